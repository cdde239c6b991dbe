"""The one error of this package."""

from __future__ import annotations


class PlanError(ValueError):
    """A plan that does not hold, or a plan file that cannot be what it says it is.

    Attributes:
        least_bytes: of a limit that cannot be held, the least one that can; None: it is not known, or it is
            about something else.
    """

    def __init__(self, message: str, least_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes
