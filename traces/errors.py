"""The one error class of this package."""

from __future__ import annotations

import os


class TraceError(ValueError):
    """Error for a trace, a buffer table or a file with invalid content.

    The message is one line: ``FILE, row N: reason``.

    Attributes:
        reason: the fault, without the place.
        file: the file as the caller named it, or None.
        row: the line of a text file (the header is line 1), otherwise the index of an event or buffer (the
            first is 0); None if no single row is wrong.
    """

    def __init__(
        self, reason: str, *, file: str | os.PathLike[str] | None = None, row: int | None = None
    ) -> None:
        self.reason = reason
        self.file = None if file is None else os.fspath(file)
        self.row = row
        place = ", ".join(
            part for part in (self.file, None if row is None else f"row {row}") if part is not None
        )
        super().__init__(f"{place}: {reason}" if place else reason)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.reason, self.file, self.row)

    def within(self, file: str | os.PathLike[str]) -> TraceError:
        """Return the same error, naming ``file`` unless the error names a file already."""
        return self if self.file is not None else TraceError(self.reason, file=file, row=self.row)


def _rebuild(reason: str, file: str | None, row: int | None) -> TraceError:
    return TraceError(reason, file=file, row=row)
