"""Simulation of allocators on a trace, with our own pool on a device without memory among them."""

from __future__ import annotations

import contextlib
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mempool import _core
from mempool.pool import Pool
from mempool.recording.events import MARKS
from solvers import simulators
from solvers.simulators.allocator import Allocator, check_bytes
from solvers.simulators.simulation import Course, Segments
from traces.trace import EventType

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from solvers.simulators import Simulation
    from traces.trace import Trace

#: Number of events between two looks of the planner for changes without a wake-up, such as a changed pattern.
MOST_BETWEEN_LOOKS = 1 << 14
#: Bytes of a device without a limit: more than any device has, few enough to count its pages.
MOST_MAPPED = 1 << 45


class _Pool(Pool):
    """A pool as on a GPU, which ignores settings of the environment."""

    reads_environment = False


@dataclass(frozen=True)
class PlannedOnline(Allocator):
    """Our pool: records, finds and plans the iteration, replays the plan, and falls back if needed.

    The simulation is no model: it runs the pool's own core, fallback, planner and solver, on a device with
    the addresses of a GPU's plain memory but without memory. The first iterations are served as in any
    program, the arena is taken at the same time as in a real pool, and requests that miss the plan go to
    segments outside the arena. Marks of the trace ("step", "begin", "end") are iteration boundaries.

    Time is not modelled: the planner looks as soon as there may be a new pattern, a plan is ready immediately
    at no cost, queued work is complete at once, and idle memory is never released. All threads count as one
    thread.

    Attributes:
        small_bytes: requests up to this size are not planned; see `mempool.settings.Settings`.
        wait_bytes: bytes that a plan must save for each wait of one stream for another; see
            `mempool.settings.Settings`.
    """

    small_bytes: int = 512
    wait_bytes: int = 1 << 20
    _growing: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_bytes(self.small_bytes, "small_bytes", most=1024)
        check_bytes(self.wait_bytes, "wait_bytes", most=2**63 - 1)

    def run(self, trace: Trace, limit_bytes: int) -> Course:
        """Run the allocator as specified by the base class."""
        limit_bytes = min(limit_bytes, MOST_MAPPED)
        device = _core.ReplayDevice(limit_bytes, growing=self._growing)
        options: dict[str, Any] = {"small_bytes": self.small_bytes, "wait_bytes": self.wait_bytes}
        with replaying(trace, device, limit_bytes, **options) as (pool, replay):
            while replay.go(MOST_BETWEEN_LOOKS):
                pool.plan_now()
        address, live, reserved, failed_at = replay.course()
        held, size, region, start, end = device.held()
        segments = Segments(
            held, size, np.zeros_like(held), region, start, np.where(end < 0, len(trace), end)
        )
        return Course(address, live, reserved, segments, device.calls, None if failed_at < 0 else failed_at)


@contextlib.contextmanager
def replaying(
    trace: Trace, device: _core.ReplayDevice, limit_bytes: int, **options: Any
) -> Iterator[tuple[Pool, _core.Replay]]:
    """Yield a pool and the replay of the trace; `device` has no memory, and the pool plans only on call.

    Args:
        trace: trace whose marks "step", "begin" and "end" are iteration boundaries, expected from the start.
        device: device from which the pool takes memory.
        limit_bytes: memory of the device; larger requests are not served.
        options: further options of the pool.
    """
    marks = _marks(trace)
    with _Pool(device, background=False, **options) as pool:
        if (marks >= 0).any():
            pool.require_step_marks()  # as `mempool.torch.TensorPool.watch` does
        yield (
            pool,
            _core.Replay(
                pool.client,
                device,
                kind=trace.kind,
                birth=trace.births,
                size=np.minimum(trace.size, 2 * limit_bytes + 1),
                stream=trace.stream,
                mark=marks,
            ),
        )


def _marks(trace: Trace) -> NDArray[np.int8]:
    """Return the pool's mark for each event, or -1."""
    number = np.full(len(trace.names) + 1, -1, np.int8)  # the last element is for events without a name
    for at, name in enumerate(trace.names):
        if name in MARKS:
            number[at] = MARKS.index(name)
    own = (trace.kind == EventType.MARK) & (trace.category < 0)
    return np.where(own, number[trace.operation], np.int8(-1))


@dataclass(frozen=True)
class PlannedGrowing(PlannedOnline):
    """Our pool on growing memory, which is mapped and unmapped in pages of 2 MiB."""

    _growing: ClassVar[bool] = True


#: Classes of allocator settings by name, in the order of comparisons.
ALLOCATORS: Mapping[str, type[Allocator]] = types.MappingProxyType(
    {**simulators.ALLOCATORS, "planned_online": PlannedOnline, "planned_growing": PlannedGrowing}
)


def simulate(
    trace: Trace, allocator: str, *, limit_bytes: int | None = None, **parameters: Any
) -> Simulation:
    """Simulate as `solvers.simulators.simulate` does, with our own pool among the allocators."""
    return simulators.simulate(trace, allocator, limit_bytes=limit_bytes, allocators=ALLOCATORS, **parameters)
