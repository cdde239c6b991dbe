"""Buffers alive at the peak load by role, operation and source line, and their absences at the peak."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from traces import EventType, buffers_of
from traces.trace import RANGE_BEGIN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces import Trace


#: Names of access recorders' marks of the phases of a training step.
PHASES = ("forward", "backward", "optimizer")


class Role(enum.IntEnum):
    """Role of a buffer by its lifetime in iterations."""

    PASSING = 0  #: within one iteration, or freed in a trace without iterations
    WRAP_AROUND = 1  #: from one iteration into a later one
    PERSISTENT = 2  #: over at least two boundaries and either never freed, or over half of all boundaries
    TO_THE_END = 3  #: never freed and over no boundary: allocated after the last one, or no boundary is known


@dataclass(frozen=True, eq=False)
class Peak:
    """The buffers alive at the first moment of the peak load; m rows, the largest first.

    Attributes:
        event: row of the trace after which the peak is reached.
        bytes: requested bytes alive.
        alloc: int64[m], row of each buffer's alloc.
        end: int64[m], row of the buffer's free; the length of the trace without a free.
        size: int64[m], bytes.
        role: int8[m], a `Role`.
    """

    event: int
    bytes: int
    alloc: NDArray[np.int64]
    end: NDArray[np.int64]
    size: NDArray[np.int64]
    role: NDArray[np.int8]


def at_peak(trace: Trace, begins: NDArray[np.int64] | None = None, *, first: int = 0) -> Peak:
    """Return the buffers alive at the peak load.

    Args:
        trace: events; all devices count together.
        begins: rows at which iterations begin, sorted int64[k]; None or empty without iterations.
        first: row from which the peak is sought.

    Raises:
        TraceError: the trace contradicts itself.
    """
    load = trace.load()
    event = first + int(load[first:].argmax()) if len(load) else 0
    buffers = buffers_of(trace)
    alive = np.flatnonzero((buffers.start <= event) & (event < buffers.end) & (buffers.size > 0))
    alive = alive[np.argsort(-buffers.size[alive], kind="stable")]
    alloc, end = buffers.start[alive], buffers.end[alive]
    begins = np.empty(0, np.int64) if begins is None else begins
    return Peak(
        event,
        int(load[first:].max(initial=0)),
        alloc,
        end,
        buffers.size[alive],
        _roles(alloc, end, begins, len(trace)),
    )


def _roles(
    alloc: NDArray[np.int64], end: NDArray[np.int64], begins: NDArray[np.int64], length: int
) -> NDArray[np.int8]:
    crossed = np.searchsorted(begins, end, side="left") - np.searchsorted(begins, alloc, side="right")
    stays = (crossed >= 2) & ((end == length) | (2 * crossed >= len(begins)))
    within = np.where(end == length, Role.TO_THE_END, Role.PASSING)
    roles = np.where(stays, Role.PERSISTENT, np.where(crossed > 0, Role.WRAP_AROUND, within))
    return roles.astype(np.int8)


@dataclass(frozen=True)
class Share:
    """Bytes at the peak by operation, source line or another attribute; ``name`` is None if unknown."""

    name: str | None
    bytes: int
    buffers: int


def shares(trace: Trace, peak: Peak, names: NDArray[np.int32], most: int) -> list[Share]:
    """Group the bytes at the peak by a column of names (``trace.operation``, `phases`), the largest first.

    Args:
        trace: the events.
        peak: the peak of that trace.
        names: int32[n], index into ``trace.names`` of each event, -1 where unknown.
        most: largest number of shares returned.
    """
    found, index = np.unique(names[peak.alloc], return_inverse=True)
    held = np.zeros(len(found), np.int64)
    np.add.at(held, index, peak.size)
    count = np.bincount(index, minlength=len(found))
    order = np.argsort(-held, kind="stable")[:most]
    return [
        Share(trace.names[name] if (name := int(found[k])) >= 0 else None, int(held[k]), int(count[k]))
        for k in order.tolist()
    ]


def phases(trace: Trace) -> NDArray[np.int32]:
    """Return the phase of each event, an index into names; -1 where unknown.

    The phase is the innermost open range of the program or, without recorded ranges, the last mark of
    `PHASES`.
    """
    if RANGE_BEGIN in trace.names:
        return _innermost_ranges(trace)
    known = [at for at, name in enumerate(trace.names) if name in PHASES]
    named = (trace.kind == EventType.MARK) & np.isin(trace.operation, known)
    last = np.maximum.accumulate(np.where(named, np.arange(len(trace)), -1))
    return np.append(trace.operation, np.int32(-1))[last]


def _innermost_ranges(trace: Trace) -> NDArray[np.int32]:
    begins = trace.names.index(RANGE_BEGIN)
    marks = np.flatnonzero((trace.kind == EventType.MARK) & (trace.category >= 0))
    inner = np.full(len(marks) + 1, -1, np.int32)  # inner[k]: the innermost range after k marks
    opened: list[int] = []
    for at, row in enumerate(marks.tolist(), 1):
        name = int(trace.operation[row])
        if trace.category[row] == begins:
            opened.append(name)
        elif name in opened:  # else the range began before the recording
            del opened[len(opened) - 1 - opened[::-1].index(name)]
        inner[at] = opened[-1] if opened else -1
    return inner[np.searchsorted(marks, np.arange(len(trace)), side="right")]


def by_bytes_and_time(peak: Peak) -> NDArray[np.int64]:
    """Return the rows of ``peak`` sorted by bytes times lifetime (in events), largest first, int64[m]."""
    order: NDArray[np.int64] = np.argsort(
        -peak.size.astype(np.float64) * (peak.end - peak.alloc), kind="stable"
    )
    return order


#: Shortest useful absence as a fraction of an iteration, given the time for copies out and back.
LEAST_ABSENCE = 0.1


@dataclass(frozen=True, eq=False)
class Absences:
    """Absences of the m buffers alive at the peak, in the order of `Peak`; times are rows of the trace.

    Attributes:
        last: int64[m], the last access at or before the peak, or the alloc.
        next: int64[m], the next access after the peak, or the free; the length of the trace without either.
        used_again: bool[m], true if ``next`` is an access; false if the buffer could have been freed earlier.
    """

    last: NDArray[np.int64]
    next: NDArray[np.int64]
    used_again: NDArray[np.bool_]

    @property
    def length(self) -> NDArray[np.int64]:
        """Return the length of each absence in events, int64[m]."""
        return self.next - self.last

    def late(self, peak: Peak) -> NDArray[np.bool_]:
        """Return a mask of the buffers that could have been freed before the peak, bool[m]."""
        late: NDArray[np.bool_] = ~self.used_again & (self.last < peak.event)
        return late

    def away(self, iteration_events: int) -> NDArray[np.bool_]:
        """Return a mask of the absences of at least `LEAST_ABSENCE` of an iteration, bool[m]."""
        away: NDArray[np.bool_] = self.length >= LEAST_ABSENCE * iteration_events
        return away


def absences(trace: Trace, peak: Peak) -> Absences | None:
    """Return the absences at the peak; None if the trace has no accesses."""
    accesses = np.flatnonzero((trace.kind == EventType.READ) | (trace.kind == EventType.WRITE))
    if not len(accesses):
        return None
    # Row of the peak for each alloc event, -1 for other events.
    row_of = np.full(len(trace), -1, np.int64)
    row_of[peak.alloc] = np.arange(len(peak.alloc))
    row = row_of[trace.births[accesses]]
    accesses, row = accesses[row >= 0], row[row >= 0]
    before = accesses <= peak.event
    last, following = peak.alloc.copy(), peak.end.copy()
    np.maximum.at(last, row[before], accesses[before])
    np.minimum.at(following, row[~before], accesses[~before])
    return Absences(last, following, following < peak.end)
