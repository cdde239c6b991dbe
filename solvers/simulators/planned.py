"""A plan of the whole trace: what is left when every lifetime is known beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solvers.check import check
from solvers.plan import Stop
from solvers.simulators.native import Allocator, check_bytes, check_power_of_two
from solvers.simulators.simulation import Course, Segments
from solvers.solve import solve
from traces.buffers import Buffers
from traces.columns import numbered
from traces.errors import TraceError
from traces.trace import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.trace import Trace

_BASE = 2 << 20  # address of the arena


@dataclass(frozen=True)
class Planned(Allocator):
    """One arena, taken at once, in which each buffer of the trace has its planned offset.

    The plan is made by `solve` of all buffers on one line, parameters as well as activations, and checked.
    That is what planning can reach, not what a first run gets: the pool must see iterations before it can
    plan them, keeps what is persistent and what is small outside the arena, and shares addresses between
    streams where that pays; here streams share none.

    Where more is alive than the device has, no plan could serve the request, and it fails. Where the plan is
    larger than the device though its load is not, the arena ends with the device, and what reaches beyond it
    fails.

    Attributes:
        alignment_bytes: sizes and offsets are multiples of this power of two.
        nodes: the budget of the search; the default is that of the pool's own plans.
    """

    alignment_bytes: int = 512
    nodes: int = 20_000_000

    def __post_init__(self) -> None:
        check_power_of_two(self.alignment_bytes, "alignment_bytes")
        check_bytes(self.nodes, "nodes")

    def run(self, trace: Trace, limit_bytes: int) -> Course:
        """As of the base.

        Raises:
            TraceError: sizes add up to 2**62 bytes or more.
        """
        freed = np.full(len(trace), len(trace), np.int64)
        frees = np.flatnonzero(trace.kind == Kind.FREE)
        freed[trace.births[frees]] = frees
        wanted = np.flatnonzero((trace.kind == Kind.ALLOC) & (trace.size > 0))
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
        """Offsets of buffers from the rows of their allocs and frees, and the arena's size, in bytes."""
        if float(size.sum(dtype=np.float64)) >= 2**61:
            raise TraceError("sizes add up to 2**62 bytes or more")
        group = numbered(stream)[1]
        buffers = Buffers.of(rows, freed, size, alignment=self.alignment_bytes, group=group, stream=stream)
        plan = solve(buffers, stop=Stop(nodes=self.nodes), solver="search")
        check(plan, buffers)
        assert plan.offset is not None
        return plan.offset[:, 0], plan.arena_bytes


def _served(
    rows: NDArray[np.int64], freed: NDArray[np.int64], size: NDArray[np.int64], limit_bytes: int
) -> NDArray[np.bool_]:
    """Which buffers have room beside those that live when they come, and had it."""
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
    """Bytes of these buffers after each event."""
    change = np.zeros(events + 1, np.int64)
    change[rows] += size
    np.subtract.at(change, np.minimum(freed, events), size)
    return np.cumsum(change[:-1])


def _one_segment(size: int, events: int) -> Segments:
    count = int(size > 0)
    columns = [_BASE, size, 0, 1, 0, events]
    return Segments(*(np.full(count, value, np.int64) for value in columns))
