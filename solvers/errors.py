"""Error class of the solvers."""

from __future__ import annotations


class PlanError(ValueError):
    """Error for an invalid plan, an inconsistent plan file, or an infeasible memory limit.

    Attributes:
        least_bytes: the smallest feasible limit in bytes if the error is about an infeasible limit; None if
            this limit is not known or the error has another cause.
    """

    def __init__(self, message: str, least_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes
