"""What is drawn over time, before anything has an address: buffers, and the pieces of their lifetimes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mempool.analysis.caveats import history_caveats, pool_caveats
from mempool.show.notes import NO_NOTES, Notes, notes_of
from traces.completeness import History, completeness
from traces.trace import NAMED, Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.buffers import Buffers
    from traces.completeness import Completeness
    from traces.trace import Trace

#: Pieces of a periodic plan that are drawn at most, as iterations go: one more than addresses repeat after.
_MOST_UNROLLED = 400_000
#: Points of the recording's clock that are kept; between them it is taken to run evenly.
_KNOTS = 4096


@dataclass(frozen=True, eq=False)
class Timeline:
    """n buffers and r pieces of lifetimes on one axis of time, pieces in order of their start.

    Attributes:
        title: which device, or that it is one iteration.
        owner: int64[r], row of the buffer.
        iteration: int64[r], the iteration that allocated it; 0 on a line.
        start: int64[r], logical time.
        end: int64[r], exclusive.
        size: int64[n], bytes.
        stream: int64[n].
        operation: int64[n], index into ``names``, -1 where unknown.
        frame: int64[n], likewise.
        module: int64[n], likewise.
        category: int64[n], likewise.
        stack: int64[n], likewise, the frames of a stack in one string with line feeds between them.
        pool: int64[n], the private pool of the buffer, 0 for the common one.
        names: the strings.
        ids: what the buffers are called, or None.
        persistent: how many buffers are alive across iterations, and are not drawn, and their bytes.
        clock: int64[2, k], logical times and the host's clock then in ns; k is 0 where there was none.
        period: events of one iteration, or None.
        ticks: what logical time counts; None for events, or allocations where there is a period.
        at: int64[k], index into ``names`` of what runs at each time, over and over; None where unknown.
        before: int64[2, k], times and another load from each until the next, to compare with; or None.
        note: one more fact, a few words.
        since: the first time; buffers from before the recording begin then.
        cut: whether buffers that begin then may be from before the recording.
        still: whether no history is known, only the state at the end, as which time has one moment.
        caveats: sentences about the facts that are missing.
        notes: events beside the buffers.
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
    ticks: str | None = None
    at: NDArray[np.int64] | None = None
    before: NDArray[np.int64] | None = None
    note: str = ""
    since: int = 0
    cut: bool = False
    still: bool = False
    caveats: tuple[str, ...] = ()
    notes: Notes = NO_NOTES


def timeline_of(
    buffers: Buffers,
    title: str,
    *,
    trace: Trace | None = None,
    free: NDArray[np.int64] | None = None,
    columns: int = 1,
) -> Timeline:
    """The pieces of buffers; what of them takes no memory, or is persistent, has none.

    Pieces from before the recording begin at its start all at once: in which order they came is not known.
    On a circle several iterations are drawn, in the steady state: one more than the ``columns`` iterations
    after which a plan's addresses repeat, as far as that is not too much to draw.

    Args:
        buffers: n of them.
        title: as in `Timeline`.
        trace: what they are the buffers of, row by row in order of its allocs: events of one device.
        free: as of `notes_of`.
        columns: of the plan, on a circle.

    Raises:
        ValueError: so many bytes that their sum does not fit 64 bits.
    """
    owner, iteration, start, end = _pieces(buffers, columns)
    named = dict.fromkeys(NAMED, np.full(len(buffers), -1)) | {"pool": np.zeros(len(buffers), np.int64)}
    since, history, notes = 0, History.WHOLE, NO_NOTES
    caveats: tuple[str, ...] = ()
    if trace is not None:
        born = np.flatnonzero(trace.kind == Kind.ALLOC)
        named = {name: getattr(trace, name)[born].astype(np.int64) for name in (*NAMED, "pool")}
        known = completeness(trace, int(trace.device[0]) if len(trace) else 0)
        since, history = _since(trace, known), known.history
        start = np.maximum(start, since)
        notes = NO_NOTES if history is History.ABSENT else notes_of(trace, free)
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
        notes=notes,
    )


def _since(trace: Trace, known: Completeness) -> int:
    """Return the row of the first event that was recorded; rows before it tell of the state until then."""
    if known.history is History.ABSENT:
        return max(len(trace) - 1, 0)
    other = np.flatnonzero((trace.kind != Kind.ALLOC) & (trace.kind != Kind.RESERVE))
    lead = slice(int(other[0]) if len(other) else len(trace))
    before = {Kind.ALLOC: known.live_before_bytes, Kind.RESERVE: known.reserved_before_bytes}
    return max(
        _first_row(np.cumsum(np.where(trace.kind[lead] == kind, trace.size[lead], 0)), total)
        for kind, total in before.items()
    )


def _first_row(sums: NDArray[np.int64], total: int) -> int:
    """Return the row after the one at which a sum reaches a total; 0 where none does."""
    at = int(np.searchsorted(sums, total))
    return at + 1 if total and at < len(sums) else 0


def _pieces(buffers: Buffers, columns: int) -> tuple[NDArray[np.int64], ...]:
    from solvers.pieces import pieces_of

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
    """The clock at some events, as it ran at most: hosts' clocks of several threads need not increase."""
    if len(trace) == 0 or trace.time_ns[0] == trace.time_ns[-1]:
        return None
    rows = np.unique(np.linspace(0, len(trace) - 1, _KNOTS).astype(np.int64))
    return np.stack([rows, np.maximum.accumulate(trace.time_ns[rows])])
