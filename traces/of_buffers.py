"""Conversion of buffers with known lifetimes to a trace, equivalent to the trace that they came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from traces.columns import distinct
from traces.errors import TraceError
from traces.trace import EventType, Trace

if TYPE_CHECKING:
    from traces.buffers import Buffers


def trace_of(buffers: Buffers) -> Trace:
    """Return one alloc and one free for each of n buffers on a line, in the order of their times; 2n events.

    At equal times frees come before allocs, because lifetimes are half-open. A buffer with an empty lifetime
    takes no memory and gets size 0. Rows become the buffers' ids, their ids the operations of the allocs, and
    times stand for nanoseconds. If all buffers have an offset, offsets become addresses; if all have one
    alignment, the metadata gets that alignment.

    Raises:
        TraceError: buffers on a circle, persistent buffers, or buffers with gaps, which events cannot
            express; or more bytes alive than int64 holds.
    """
    if buffers.period is not None or buffers.persistent.any():
        raise TraceError("buffers of an iteration are no trace")
    if len(buffers.gap_buffer):
        raise TraceError(f"events cannot tell the gaps of buffer {buffers.name(int(buffers.gap_buffer[0]))}")
    n = len(buffers)
    row = np.tile(np.arange(n), 2)
    free = np.arange(2 * n) >= n
    time = np.concatenate([buffers.start, buffers.end])
    empty = (buffers.lengths == 0)[row]
    # At one time: ends, then each empty lifetime, its alloc first, then starts.
    turn = np.where(empty, 1, np.where(free, 0, 2))
    order = np.lexsort([free, row, turn, time])
    row, free = row[order], free[order]
    alignments = distinct(buffers.alignment).tolist()
    trace = Trace.of(
        np.where(free, EventType.FREE, EventType.ALLOC),
        row,
        np.where(free | empty[order], 0, buffers.size[row]),
        stream=buffers.stream[row],
        time_ns=time[order],
        operation=np.where(free, -1, row) if buffers.ids is not None else -1,
        address=np.where(free, -1, buffers.offset[row]) if (buffers.offset >= 0).all() else -1,
        names=buffers.ids or (),
        metadata={"alignment": str(alignments[0])} if len(alignments) == 1 else {},
    )
    trace.validate()
    return trace
