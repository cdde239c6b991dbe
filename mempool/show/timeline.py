"""Timelines: buffers and the pieces of their lifetimes, drawn over time independently of addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mempool.analysis.caveats import history_caveats, pool_caveats
from mempool.show.annotations import NO_ANNOTATIONS, Annotations, annotations_of
from traces.completeness import History, completeness
from traces.trace import NAMED, EventType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.buffers import Buffers
    from traces.completeness import Completeness
    from traces.trace import Trace

#: Most drawn pieces of a periodic plan, which bounds the drawn iterations.
_MOST_UNROLLED = 400_000
#: Number of kept points of the recording's clock, which is interpolated between them.
_KNOTS = 4096


@dataclass(frozen=True, eq=False)
class Timeline:
    """The n buffers and r pieces of lifetimes on one time axis, pieces in order of start.

    Attributes:
        title: the device, or a note that this is one iteration.
        owner: int64[r], row of the buffer.
        iteration: int64[r], the iteration that allocated the piece's buffer; 0 on a line.
        start: int64[r], logical time.
        end: int64[r], exclusive.
        size: int64[n], bytes.
        stream: int64[n].
        operation: int64[n], index into ``names``, -1 where unknown.
        frame: int64[n], likewise.
        module: int64[n], likewise.
        category: int64[n], likewise.
        stack: int64[n], likewise, the frames of a stack in one string with line feeds between them.
        pool: int64[n], the private pool of the buffer, 0 for the default pool.
        names: the strings.
        ids: names of the buffers, or None.
        persistent: number and bytes of the buffers that are alive across iterations, which are not drawn.
        clock: int64[2, k], logical times and the host's clock in ns at these times; None without a clock.
        period: events of one iteration, or None.
        since: the first time, at which buffers from before the recording begin.
        cut: true if buffers that begin at ``since`` may be from before the recording.
        still: true if only the state at the end is known, so that the time axis has one moment.
        caveats: sentences about missing facts.
        annotations: refused requests, marks and ranges.
    """

    title: str
    owner: NDArray[np.int64]
    iteration: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    size: NDArray[np.int64]
    stream: NDArray[np.int64]
    operation: NDArray[np.int64]
    frame: NDArray[np.int64]
    module: NDArray[np.int64]
    category: NDArray[np.int64]
    stack: NDArray[np.int64]
    pool: NDArray[np.int64]
    names: tuple[str, ...] = ()
    ids: tuple[str, ...] | None = None
    persistent: tuple[int, int] = (0, 0)
    clock: NDArray[np.int64] | None = None
    period: int | None = None
    since: int = 0
    cut: bool = False
    still: bool = False
    caveats: tuple[str, ...] = ()
    annotations: Annotations = NO_ANNOTATIONS


def timeline_of(
    buffers: Buffers,
    title: str,
    *,
    trace: Trace | None = None,
    free: NDArray[np.int64] | None = None,
    columns: int = 1,
) -> Timeline:
    """Return the timeline of buffers; persistent buffers and buffers without memory have no pieces.

    Pieces from before the recording begin at its start, since their order is unknown. On a circle, one more
    iteration of the steady state is drawn than the ``columns`` iterations after which addresses repeat,
    unless that is too much to draw.

    Args:
        buffers: the n buffers.
        title: as in `Timeline`.
        trace: events of one device, whose allocs are the buffers in order of rows.
        free: as for `annotations_of`.
        columns: iterations after which the plan's addresses repeat, on a circle.

    Raises:
        ValueError: the sum of the bytes exceeds 64 bits.
    """
    owner, iteration, start, end = _pieces(buffers, columns)
    named = dict.fromkeys(NAMED, np.full(len(buffers), -1)) | {"pool": np.zeros(len(buffers), np.int64)}
    since, history, annotations = 0, History.WHOLE, NO_ANNOTATIONS
    caveats: tuple[str, ...] = ()
    if trace is not None:
        born = np.flatnonzero(trace.kind == EventType.ALLOC)
        named = {name: getattr(trace, name)[born].astype(np.int64) for name in (*NAMED, "pool")}
        known = completeness(trace, int(trace.device[0]) if len(trace) else 0)
        since, history = _since(trace, known), known.history
        start = np.maximum(start, since)
        annotations = NO_ANNOTATIONS if history is History.ABSENT else annotations_of(trace, free)
        caveats = (*history_caveats(trace, known.device), *pool_caveats(trace))
    order = np.argsort(start, kind="stable")
    return Timeline(
        title,
        owner[order],
        iteration[order],
        start[order],
        end[order],
        buffers.size,
        buffers.stream,
        operation=named["operation"],
        frame=named["frame"],
        module=named["module"],
        category=named["category"],
        stack=named["stack"],
        pool=named["pool"],
        names=() if trace is None else trace.names,
        ids=buffers.ids,
        persistent=(int(buffers.persistent.sum()), int(buffers.size[buffers.persistent].sum())),
        clock=None if trace is None else _clock(trace),
        period=buffers.period,
        since=since,
        cut=history is History.WINDOW,
        still=history is History.ABSENT,
        caveats=caveats,
        annotations=annotations,
    )


def _since(trace: Trace, known: Completeness) -> int:
    """Return the row of the first recorded event; earlier rows describe the state before."""
    if known.history is History.ABSENT:
        return max(len(trace) - 1, 0)
    other = np.flatnonzero((trace.kind != EventType.ALLOC) & (trace.kind != EventType.RESERVE))
    lead = slice(int(other[0]) if len(other) else len(trace))
    before = {EventType.ALLOC: known.live_before_bytes, EventType.RESERVE: known.reserved_before_bytes}
    return max(
        _first_row(np.cumsum(np.where(trace.kind[lead] == kind, trace.size[lead], 0)), total)
        for kind, total in before.items()
    )


def _first_row(sums: NDArray[np.int64], total: int) -> int:
    """Return the row after the first row whose sum reaches a total; 0 if no sum does."""
    at = int(np.searchsorted(sums, total))
    return at + 1 if total and at < len(sums) else 0


def _pieces(buffers: Buffers, columns: int) -> tuple[NDArray[np.int64], ...]:
    from solvers.packing.bounds import pieces_of

    pieces = pieces_of(buffers)
    owner, start, end, period = pieces.owner, pieces.start, pieces.end, buffers.period
    if period is None:
        return owner, np.zeros(len(owner), np.int64), start, end
    count = max(min(columns + 1, _MOST_UNROLLED // max(len(owner), 1)), 1)
    first = -buffers.max_instances
    turn = np.repeat(np.arange(first, count), len(owner))
    owner, start, end = (np.tile(column, count - first) for column in (owner, start, end))
    start, end = np.maximum(start + turn * period, 0), np.minimum(end + turn * period, count * period)
    seen = start < end
    return owner[seen], turn[seen], start[seen], end[seen]


def _clock(trace: Trace) -> NDArray[np.int64] | None:
    """Return the clock at some events as a running maximum, since threads' clocks differ."""
    if len(trace) == 0 or trace.time_ns[0] == trace.time_ns[-1]:
        return None
    rows = np.unique(np.linspace(0, len(trace) - 1, _KNOTS).astype(np.int64))
    return np.stack([rows, np.maximum.accumulate(trace.time_ns[rows])])
