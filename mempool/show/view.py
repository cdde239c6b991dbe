"""Views: recorded, simulated or planned addresses of a timeline's pieces, without large unused ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from mempool.show.timeline import Timeline
    from solvers import Plan

#: Largest drawn range of unused addresses, as a share of the used addresses.
_UNUSED = 1 / 64
_MOST_BYTES = 2**62


@dataclass(frozen=True, eq=False)
class Segments:
    """Reserved memory: k ranges of addresses, each with a time span.

    Attributes:
        address: int64[k].
        size: int64[k], bytes.
        start: int64[k], logical time.
        end: int64[k], exclusive.
    """

    address: NDArray[np.int64]
    size: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class View:
    """Addresses for the pieces of a timeline.

    Attributes:
        title: source of the addresses.
        timeline: index of the timeline in the scene.
        address: int64[r], drawn address of each piece; -1 for a piece without an address.
        regions: int64[2, g], first drawn address of each range of addresses, and the range's first real
            address.
        top: end of the last range, in drawn bytes.
        reserved_bytes: arena of a plan; 0 if the segments give the reserved bytes.
        segments: segments with drawn addresses.
        offsets: true if addresses are offsets into an arena.
    """

    title: str
    timeline: int
    address: NDArray[np.int64]
    regions: NDArray[np.int64]
    top: int
    reserved_bytes: int
    segments: Segments
    offsets: bool


_NONE = np.zeros(0, np.int64)
NO_SEGMENTS = Segments(_NONE, _NONE, _NONE, _NONE)


def recorded_view(
    title: str, at: int, timeline: Timeline, address: NDArray[np.int64], segments: Segments = NO_SEGMENTS
) -> View:
    """Return a view of real addresses, or of a simulated allocator's addresses.

    Args:
        title: as in `View`.
        at: index of the timeline.
        timeline: the timeline.
        address: int64[n], address of each buffer; -1 for none.
        segments: segments with real addresses.

    Raises:
        ValueError: addresses or segments span more than 2**62 bytes.
    """
    if segments.size.sum(dtype=np.float64) > _MOST_BYTES:
        raise ValueError("segments of more than 2**62 bytes")
    low = address[timeline.owner]
    size = timeline.size[timeline.owner]
    has = low >= 0
    every = np.concatenate([low[has], segments.address])
    regions, top = _regions(every, np.concatenate([size[has], segments.size]))
    drawn = Segments(_drawn(segments.address, regions), segments.size, segments.start, segments.end)
    return View(title, at, np.where(has, _drawn(low, regions), -1), regions, top, 0, drawn, offsets=False)


def plan_view(title: str, at: int, timeline: Timeline, plan: Plan) -> View:
    """Return a view of a plan's offsets.

    Args:
        title: as in `View`.
        at: index of the timeline.
        timeline: timeline of the buffers that the plan places, row by row.
        plan: a plan with offsets.
    """
    assert plan.offset is not None
    offset = plan.offset[timeline.owner, timeline.iteration % plan.columns]
    whole = np.zeros((2, 1), np.int64)
    return View(title, at, offset, whole, plan.arena_bytes, plan.arena_bytes, NO_SEGMENTS, offsets=True)


def segments_of(columns: Any, *, since: int, end: int) -> Segments:
    """Return the segments of a simulation, clipped to the time axis."""
    start, end_of = np.maximum(columns.start, since), np.minimum(columns.end, end)
    return Segments(columns.address, columns.size, start, np.maximum(end_of, start))


def _regions(low: NDArray[np.int64], size: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Return the ranges that are used at any time, int64[2, g] as in `View`, and their total bytes.

    Addresses and sizes are up to 2**63 and 2**62, so their sums fit unsigned 64 bits.
    """
    if len(low) == 0:
        return np.zeros((2, 1), np.int64), 0
    order = np.argsort(low, kind="stable")
    begin = low[order].astype(np.uint64)
    reach = np.maximum.accumulate(begin + size[order].astype(np.uint64))
    gap = np.zeros(len(low), np.uint64)
    gap[1:] = np.where(begin[1:] > reach[:-1], begin[1:] - reach[:-1], 0)
    used = int(reach[-1]) - int(begin[0]) - sum(gap.tolist())
    opens = gap > used * _UNUSED
    opens[0] = True
    first = np.flatnonzero(opens)
    real = begin[first]
    length = np.append(reach[first[1:] - 1], reach[-1]) - real
    drawn = np.append(np.uint64(0), np.cumsum(length))
    if drawn[-1] > _MOST_BYTES:
        raise ValueError("addresses reach over more than 2**62 bytes")
    return np.stack([drawn[:-1], real]).astype(np.int64), int(drawn[-1])


def _drawn(address: ArrayLike, regions: NDArray[np.int64]) -> NDArray[np.int64]:
    address = np.asarray(address)
    at = np.maximum(np.searchsorted(regions[1], address, side="right") - 1, 0)
    drawn: NDArray[np.int64] = address - regions[1][at] + regions[0][at]
    return drawn
