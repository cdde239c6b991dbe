"""A trace from a file of any format that holds one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traces.errors import TraceError
from traces.files import sniff

if TYPE_CHECKING:
    from _typeshed import StrPath

    from traces.trace import Trace


def read(path: StrPath) -> Trace:
    """Read a trace of ours, a snapshot of PyTorch or a log of RMM, told by its content.

    Raises:
        TraceError: naming the file: none of these, or what it says cannot have happened.
        OSError: the file cannot be opened.
    """
    kind = sniff(path)
    if kind == "trace":
        from traces.parquet import read_trace

        return read_trace(path)
    if kind == "snapshot":
        from traces.snapshot import read_snapshot

        return read_snapshot(path)
    if kind == "rmm":
        from traces.rmm_log import read_rmm_log

        return read_rmm_log(path)
    raise TraceError(f"a {kind}, which has no events", file=path)
