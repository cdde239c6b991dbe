"""Registry of the file formats: how each is recognised by content, and the functions that read its events.

A new format needs a module with a test of the first bytes and a reader, and one line in `FORMATS`.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from traces.errors import TraceError
from traces.formats import chrome, cupy_hook, flight, minimalloc, parquet, rmm_log, snapshot
from traces.formats.text_files import Head, read_head

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from _typeshed import StrPath

    from traces.buffers import Buffers
    from traces.trace import Trace


class Reader(Protocol):
    """Function that reads a whole file; arguments and errors are those of `traces.read.read`."""

    def __call__(
        self,
        path: StrPath,
        *,
        skipped: Counter[str] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> Trace:
        """Return the events."""


class PieceReader(Protocol):
    """Function that yields a file in pieces; arguments and errors are those of `traces.read.read_pieces`."""

    def __call__(self, path: StrPath, *, skipped: Counter[str] | None = None) -> Iterator[Trace]:
        """Yield pieces of the events."""


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        name: short name, as `sniff` returns.
        description: noun phrase for messages.
        matches: function that returns true if the first bytes of a file are of this format; raises a
            TraceError with the remedy for a similar format that cannot be read.
        read: reader of a whole file; None for files without events.
        read_pieces: reader in bounded memory, if the format has one.
        read_buffers: reader of the buffers, if the format holds buffers instead of events.
    """

    name: str
    description: str
    matches: Callable[[Head], bool]
    read: Reader | None
    read_pieces: PieceReader | None = None
    read_buffers: Callable[[StrPath], Buffers] | None = None


#: All formats, in the order in which they are tried.
FORMATS = (
    Format("trace", "a trace", parquet.is_trace, parquet.read_trace),
    Format("plan", "a plan", parquet.is_plan, None),
    Format("snapshot", "a snapshot", snapshot.is_snapshot, snapshot.read_snapshot),
    Format("flight", "a flight recorder's file", flight.is_flight, flight.read_flight),
    Format("rmm", "a log of RMM", rmm_log.is_log, rmm_log.read_rmm_log, rmm_log.iter_rmm_log),
    Format(
        "cupy",
        "lines of CuPy's DebugPrintHook",
        cupy_hook.is_output,
        cupy_hook.read_cupy_hook,
        cupy_hook.iter_cupy_hook,
    ),
    Format("chrome", "a profiler's trace", chrome.is_json, chrome.read_chrome),
    Format(
        "csv",
        "a CSV with a column 'size'",
        minimalloc.is_csv,
        minimalloc.read_csv_as_trace,
        read_buffers=minimalloc.read_csv,
    ),
)


def format_of(path: StrPath) -> Format:
    """Return the format of a file, by content.

    Raises:
        TraceError: an unknown format, or a pipe or a device, which is not opened.
        OSError: the file cannot be opened.
    """
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise TraceError("no regular file: it is read more than once, so store it first", file=path)
    head = read_head(path)
    if not head.content:
        raise TraceError("the file is empty", file=path)
    try:
        for candidate in FORMATS:
            if candidate.matches(head):
                return candidate
    except TraceError as error:
        raise error.within(path) from None
    *others, last = (candidate.description for candidate in FORMATS)
    raise TraceError(f"neither {', '.join(others)} nor {last}", file=path)


def sniff(path: StrPath) -> str:
    """Return the short name of a file's format, as in `FORMATS`: ``trace`` or ``plan``, for example.

    Raises:
        TraceError, OSError: as `format_of`.
    """
    return format_of(path).name
