"""Offline plan of a whole trace: the arena that suffices if all lifetimes are known in advance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solvers.packing.check import check
from solvers.packing.plan import Stop
from solvers.packing.solve import solve
from solvers.simulators.allocator import Allocator, check_bytes, check_power_of_two
from solvers.simulators.simulation import Course, Segments
from traces.buffers import Buffers
from traces.columns import numbered
from traces.errors import TraceError
from traces.trace import EventType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.trace import Trace

_BASE = 2 << 20  # address of the arena


@dataclass(frozen=True)
class Planned(Allocator):
    """One arena, reserved at once, in which each buffer of the trace has a planned offset.

    The plan is made by `solve` of all buffers on one line, parameters as well as activations, and checked.
    The result is a bound of planning, not a prediction of a first run: a pool must see iterations before
    planning them, keeps persistent and small buffers outside the arena, and shares addresses between streams
    if that pays. In this plan, streams share no addresses.

    A request fails if the load exceeds the device, since no plan could serve it. If only the arena exceeds
    the device, the arena is cut at the device's end, and buffers beyond the end fail.

    Attributes:
        alignment_bytes: sizes and offsets are multiples of this power of two.
        nodes: node budget of the search; the default is that of the pool's own plans.
    """

    alignment_bytes: int = 512
    nodes: int = 20_000_000

    def __post_init__(self) -> None:
        check_power_of_two(self.alignment_bytes, "alignment_bytes")
        check_bytes(self.nodes, "nodes")

    def run(self, trace: Trace, limit_bytes: int) -> Course:
        """Simulate all events of a trace, see `Allocator.run`.

        Raises:
            TraceError: rounded sizes add up to 2**61 bytes or more.
        """
        freed = np.full(len(trace), len(trace), np.int64)
        frees = np.flatnonzero(trace.kind == EventType.FREE)
        freed[trace.births[frees]] = frees
        wanted = np.flatnonzero((trace.kind == EventType.ALLOC) & (trace.size > 0))
        size = np.minimum(trace.size, 2 * limit_bytes + 1)
        size = -(-size // self.alignment_bytes) * self.alignment_bytes
        rows = wanted[_served(wanted, freed[wanted], size[wanted], limit_bytes)]
        offset, arena = self._planned(rows, freed[rows], size[rows], trace.stream[rows])
        inside = offset + size[rows] <= limit_bytes
        rows, offset, arena = rows[inside], offset[inside], min(arena, limit_bytes)
        failed = np.setdiff1d(wanted, rows, assume_unique=True)
        address = np.full(len(trace), -1, np.int64)
        address[rows] = _BASE + offset
        return Course(
            address=address,
            live=_load(len(trace), rows, freed[rows], size[rows]),
            reserved=np.full(len(trace), arena),
            segments=_one_segment(arena, len(trace)),
            driver_calls=int(arena > 0),
            failed_at=int(failed[0]) if len(failed) else None,
        )

    def _planned(
        self,
        rows: NDArray[np.int64],
        freed: NDArray[np.int64],
        size: NDArray[np.int64],
        stream: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], int]:
        """Return the offsets of buffers, given the rows of their allocs and frees, and the arena's bytes."""
        if float(size.sum(dtype=np.float64)) >= 2**61:
            raise TraceError("sizes add up to 2**62 bytes or more")
        group = numbered(stream)[1]
        buffers = Buffers.of(rows, freed, size, alignment=self.alignment_bytes, group=group, stream=stream)
        plan = solve(buffers, stop=Stop(nodes=self.nodes))
        check(plan, buffers)
        assert plan.offset is not None
        return plan.offset[:, 0], plan.arena_bytes


def _served(
    rows: NDArray[np.int64], freed: NDArray[np.int64], size: NDArray[np.int64], limit_bytes: int
) -> NDArray[np.bool_]:
    """Return a mask of the buffers that fit next to the served buffers alive at their alloc."""
    fits_int64 = float(size.sum(dtype=np.float64)) < 2**62
    if fits_int64 and _load(int(freed.max(initial=0)) + 1, rows, freed, size).max() <= limit_bytes:
        return np.ones(len(rows), np.bool_)
    served = np.zeros(len(rows), np.bool_)
    alive = 0
    order = np.argsort(np.concatenate([rows, freed]), kind="stable").tolist()
    sizes = size.tolist()
    for at in order:
        if at < len(rows):
            served[at] = alive + sizes[at] <= limit_bytes
            alive += sizes[at] if served[at] else 0
        elif served[at - len(rows)]:
            alive -= sizes[at - len(rows)]
    return served


def _load(
    events: int, rows: NDArray[np.int64], freed: NDArray[np.int64], size: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the bytes of these buffers alive after each event."""
    change = np.zeros(events + 1, np.int64)
    change[rows] += size
    np.subtract.at(change, np.minimum(freed, events), size)
    return np.cumsum(change[:-1])


def _one_segment(size: int, events: int) -> Segments:
    count = int(size > 0)
    columns = [_BASE, size, 0, 1, 0, events]
    return Segments(*(np.full(count, value, np.int64) for value in columns))
