"""Decomposed packing of iteration variants: coupling buffers first, then each variant's own buffers.

All variants on one line (`solvers.packing.variants`) give buffers with many gaps, for which search is slow
and less effective. Only few buffers couple the variants: those that outlive their iteration, and those of
common beginnings. Once the coupling buffers are placed, the rest splits into one problem without gaps for
each variant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from traces.buffers import Buffers
from traces.intervals import union_of_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from solvers.packing.plan import Plan
    from solvers.packing.variants import Joint

#: Largest fraction of coupling buffers for which the decomposition helps.
MOST_COUPLING = 0.25
#: Largest number of rectangles that represent the coupling buffers alive in one variant; usually few.
MOST_RECTANGLES = 4096


def pack_coupled(
    joint: Joint, solve: Callable[[Buffers], Plan], *, around: Sequence[tuple[int, int]] = ()
) -> NDArray[np.int64] | None:
    """Pack all of ``joint.buffers`` and return their offsets, int64, or None.

    None means that the decomposition does not help (too many coupling buffers, several streams, too many
    rectangles) or that `solve` found no offsets, as after an interrupt.

    Args:
        joint: the variants on one line.
        solve: makes a plan for buffers on a line, some of which have fixed offsets.
        around: non-overlapping (begin, end) ranges of offsets that no buffer may use.
    """
    rows = np.flatnonzero(joint.couples)
    if len(rows) > MOST_COUPLING * len(joint.buffers) or len(set(joint.buffers.stream.tolist())) > 1:
        return None
    offset = np.full(len(joint.buffers), -1, np.int64)
    length = int(joint.buffers.end.max(initial=0))
    kept = [(0, length, begin, end) for begin, end in around]
    found = _beside(joint.buffers.select(rows), kept, solve)
    if found is None:
        return None
    offset[rows] = found
    for own, line, owner, (start, end) in joint.apart():
        low = offset[owner]
        boxes = list(_disjoint(start, end, low, low + joint.buffers.size[owner]))
        if len(boxes) > MOST_RECTANGLES:
            return None
        found = _beside(line, boxes + [(0, length, *box[2:]) for box in kept], solve)
        if found is None:
            return None
        offset[own] = found
    return offset


def _beside(
    buffers: Buffers, boxes: Sequence[tuple[int, int, int, int]], solve: Callable[[Buffers], Plan]
) -> NDArray[np.int64] | None:
    """Return offsets of buffers around taken boxes (start, end, begin, end) in time and address, or None."""
    n = len(buffers)
    if n == 0:
        return np.zeros(0, np.int64)
    start, end, low, high = np.array(boxes, np.int64).reshape(-1, 4).T
    free = np.ones(len(boxes), np.int64)
    gaps = np.stack([buffers.gap_buffer, buffers.gap_start, buffers.gap_end], axis=1)
    plan = solve(
        Buffers.of(
            np.concatenate([buffers.start, start]),
            np.concatenate([buffers.end, end]),
            np.concatenate([buffers.size, high - low]),
            alignment=np.concatenate([buffers.alignment, free]),
            offset=np.concatenate([np.full(n, -1), low]),
            gaps=gaps,
        )
    )
    return None if plan.offset is None else plan.offset[:n, 0]


def _disjoint(
    start: NDArray[np.int64], end: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield non-overlapping rectangles (start, end, low, high) that cover the same area as the given ones."""
    times = np.unique(np.concatenate([start, end])).tolist()
    open_: dict[tuple[int, int], int] = {}  # range of addresses -> start time
    for time in times:
        alive = (start <= time) & (time < end)
        now = dict.fromkeys(
            union_of_ranges(zip(low[alive].tolist(), high[alive].tolist(), strict=True)), time
        )
        for place, since in open_.items():
            if place in now:
                now[place] = since
            else:
                yield since, time, *place
        open_ = now
