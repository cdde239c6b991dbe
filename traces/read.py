"""Reading of traces from any supported file format, whole or in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traces.errors import TraceError
from traces.formats.sniff import sniff

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
    """Read a trace file, a PyTorch snapshot or profiler trace, an RMM log, or lines of CuPy's hook.

    The buffers of a MiniMalloc CSV are converted to equivalent events (`traces.of_buffers`).

    Args:
        path: the file, recognised by content.
        skipped: receives the counts of invalid events, which are left out, by reason; None: the first is an
            error.
        progress: called now and then with the amount read so far and the whole amount: events for Parquet
            files, else bytes; 0 for the latter if unknown.

    Raises:
        TraceError: naming the file: an unknown format, or impossible events.
        OSError: the file cannot be opened.
    """
    kind = sniff(path)
    if kind == "trace":
        from traces.formats.parquet import read_trace

        return read_trace(path, skipped=skipped, progress=progress)
    if kind == "snapshot":
        from traces.formats.snapshot import read_snapshot

        return read_snapshot(path, skipped=skipped, progress=progress)
    if kind == "rmm":
        from traces.formats.rmm_log import read_rmm_log

        return read_rmm_log(path, skipped=skipped, progress=progress)
    if kind == "cupy":
        from traces.formats.cupy_hook import read_cupy_hook

        return read_cupy_hook(path, skipped=skipped, progress=progress)
    if kind == "chrome":
        from traces.formats.chrome import read_chrome

        return read_chrome(path, skipped=skipped, progress=progress)
    if kind == "csv":
        from traces.formats.minimalloc import read_csv
        from traces.of_buffers import trace_of

        buffers = read_csv(path)
        try:
            return trace_of(buffers)
        except TraceError as error:
            raise TraceError(error.reason, file=path) from None
    raise TraceError(f"a {kind}, which has no events", file=path)


def read_pieces(path: StrPath, *, skipped: Counter[str] | None = None) -> Iterator[Trace]:
    """Read a file as pieces of one trace, each with separate names and the metadata of the whole.

    Logs of RMM and of CuPy are read twice, in bounded memory but for their addresses; other formats are one
    piece. A piece may free buffers of earlier pieces. ``skipped`` is complete after the first piece.

    Args:
        path: as `read`.
        skipped: as `read`.

    Raises:
        TraceError, OSError: as `read`.
    """
    kind = sniff(path)
    if kind == "rmm":
        from traces.formats.rmm_log import iter_rmm_log

        yield from iter_rmm_log(path, skipped=skipped)
    elif kind == "cupy":
        from traces.formats.cupy_hook import iter_cupy_hook

        yield from iter_cupy_hook(path, skipped=skipped)
    else:
        yield read(path, skipped=skipped)
