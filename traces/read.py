"""Reading of traces from any supported file format, whole or in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traces.errors import TraceError
from traces.formats.registry import format_of

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from _typeshed import StrPath

    from traces.trace import Trace


def read(
    path: StrPath,
    *,
    skipped: Counter[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Trace:
    """Read a file of any format of `traces.formats.registry` that has events.

    The buffers of a MiniMalloc CSV are converted to equivalent events (`traces.transforms`).

    Args:
        path: the file, recognised by content.
        skipped: receives the counts of omitted invalid events, by reason; None: the first is an error.
        progress: called repeatedly with the amount read so far and the whole amount (0 if unknown), in
            events of Parquet files, else in bytes.

    Raises:
        TraceError: naming the file: an unknown format, or impossible events.
        OSError: the file cannot be opened.
    """
    file_format = format_of(path)
    if file_format.read is None:
        raise TraceError(f"{file_format.description}, which has no events", file=path)
    return file_format.read(path, skipped=skipped, progress=progress)


def read_pieces(path: StrPath, *, skipped: Counter[str] | None = None) -> Iterator[Trace]:
    """Read a file as pieces of one trace, each with separate names and the trace's metadata.

    Logs of RMM and of CuPy are read twice, in bounded memory except for their addresses; other formats are
    one piece. A piece may free buffers of earlier pieces. ``skipped`` is complete after the first piece.

    Args:
        path: as `read`.
        skipped: as `read`.

    Raises:
        TraceError, OSError: as `read`.
    """
    file_format = format_of(path)
    if file_format.read_pieces is not None:
        yield from file_format.read_pieces(path, skipped=skipped)
    else:
        yield read(path, skipped=skipped)
