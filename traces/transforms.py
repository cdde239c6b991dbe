"""Traces derived from other traces or from buffers.

The functions convert refused requests to buffers, private pools to streams, and buffers to events, and remove
contradictory events.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.columns import distinct
from traces.errors import TraceError
from traces.trace import COLUMNS, UNKNOWN, EventType, Trace

if TYPE_CHECKING:
    from collections import Counter

    from numpy.typing import NDArray

    from traces.buffers import Buffers


def refused_as_buffers(trace: Trace) -> tuple[Trace, NDArray[np.int64]]:
    """Return a trace in which each refused request is a buffer, allocated and freed at once.

    An allocator that serves the whole result would have served the failed requests, too; the program's later
    requests are unknown.

    Returns:
        The trace, and for each of its rows the row of the given trace, int64[m].
    """
    refused = trace.kind == EventType.REFUSED
    if not refused.any():
        return trace, np.arange(len(trace))
    rows = np.repeat(np.arange(len(trace)), 1 + refused)
    table: dict[str, Any] = {name: np.array(getattr(trace, name)[rows]) for name in COLUMNS}
    alloc = np.flatnonzero(table["kind"] == EventType.REFUSED)[::2]
    first = int(trace.buffer.max(initial=-1)) + 1
    table["kind"][alloc], table["kind"][alloc + 1] = EventType.ALLOC, EventType.FREE
    for at in (alloc, alloc + 1):
        table["buffer"][at] = first + np.arange(len(alloc))
    for name in ("size", "category"):
        table[name][alloc + 1] = UNKNOWN[name]
    return dataclasses.replace(trace, **table), rows


def pools_as_streams(trace: Trace) -> Trace:
    """Return the trace with a separate stream for each pair of pool and stream, numbered from 0.

    A graph writes to the same addresses at each replay, so memory of a private pool serves no other request,
    even while the pool has no live buffer. With this conversion, allocators that separate streams separate
    private pools, too.
    """
    if not trace.pool.any():
        return trace
    freed = trace.kind == EventType.FREE
    pool = np.where(freed, trace.pool[trace.births], trace.pool)
    pairs = np.stack([pool, trace.stream], axis=1)
    _, stream = np.unique(pairs, axis=0, return_inverse=True)
    return dataclasses.replace(trace, stream=stream.reshape(-1))


def without_contradictions(trace: Trace, skipped: Counter[str]) -> Trace:
    """Return the possible events: for each buffer, the events from its first alloc to the next free.

    Args:
        trace: a trace that need not be valid.
        skipped: receives the counts of the removed events, by reason.
    """
    keep = np.ones(len(trace), np.bool_)
    for mask, reason in trace.faults():
        _drop(keep, mask, reason, skipped)
    for mask, reason in _contradictions(trace, np.flatnonzero(keep & trace.of_buffers)):
        _drop(keep, mask, reason, skipped)
    if keep.all():
        return trace
    return dataclasses.replace(trace, **{name: getattr(trace, name)[keep] for name in COLUMNS})


def _drop(keep: NDArray[np.bool_], mask: NDArray[np.bool_], reason: str, skipped: Counter[str]) -> None:
    if count := int((keep & mask).sum()):
        skipped[reason] += count
        keep &= ~mask


def _contradictions(trace: Trace, rows: NDArray[np.int64]) -> list[tuple[NDArray[np.bool_], str]]:
    """Return masks of the events among ``rows`` that violate the order alloc, accesses, free."""
    order = rows[np.argsort(trace.buffer[rows], kind="stable")]  # sorted by buffer, then by time
    opens = np.ones(len(order), np.bool_)
    opens[1:] = trace.buffer[order[1:]] != trace.buffer[order[:-1]]
    mine, at = np.cumsum(opens) - 1, np.arange(len(order))
    kind = trace.kind[order]

    def first(which: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the first of each buffer's events that ``which`` marks."""
        found = np.full(int(opens.sum()), len(order), np.int64)
        np.minimum.at(found, mine[which], at[which])
        result: NDArray[np.int64] = found[mine]
        return result

    birth = first(kind == EventType.ALLOC)
    death = first((kind == EventType.FREE) & (at > birth))
    found = []
    for mask, reason in (
        ((kind == EventType.ALLOC) & (at > birth), "a buffer is allocated a second time"),
        (at < birth, "an event of a buffer before its alloc"),
        (at > death, "an event of a buffer after its free"),
    ):
        of_all = np.zeros(len(trace), np.bool_)
        of_all[order[mask]] = True
        found.append((of_all, reason))
    return found


def trace_of_buffers(buffers: Buffers) -> Trace:
    """Return the 2n events of n buffers on a line: one alloc and one free each, in order of time.

    At equal times frees come before allocs, because lifetimes are half-open. A buffer with an empty lifetime
    takes no memory and gets size 0. The trace's buffer ids are the rows, the operations of the allocs are the
    buffers' ids, and times become nanoseconds. If all buffers have an offset, offsets become addresses; if
    all have one alignment, the metadata gets that alignment.

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
    # At one time: ends, then empty lifetimes, alloc before free, then starts.
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
