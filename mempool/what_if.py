"""What a trace would be under allocators, among them our own pool: itself, on a device without memory."""

from __future__ import annotations

import contextlib
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mempool import _core
from mempool.pool import Pool
from mempool.recording import MARKS
from solvers import simulators
from solvers.simulators.native import Allocator, check_bytes
from solvers.simulators.simulation import Course, Segments
from traces.trace import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from solvers.simulators import Simulation
    from traces.trace import Trace

#: Events between two looks at what rings no bell, such as that a pattern has changed.
MOST_BETWEEN_LOOKS = 1 << 14


class _Pool(Pool):
    """As a GPU's: what it is asked here and in the environment are two things."""

    reads_environment = False


@dataclass(frozen=True)
class PlannedOnline(Allocator):
    """Our pool: it records, finds the iteration, plans it, replays the plan, and falls back when it must.

    No model: the core of the pool, its fallback, planner and solver, on a device that has the addresses of a
    GPU's plain memory and no memory. Its first iterations are served as they are anywhere, the plan's arena
    is taken when it would be, and what does not follow it goes to segments beside it. Marks of the trace
    ("step", "begin", "end") are iterations' ends.

    Not modelled: time. The planner looks at once when there may be something new, and its plan is ready then;
    work that is queued is done at once; memory that was idle for a second stays. All threads are one, and a
    plan costs nothing.

    Attributes:
        small_bytes: requests up to this size are not planned, as `mempool.settings.Settings` has it.
        wait_bytes: what a plan must save for each wait of one stream for another, likewise.
    """

    small_bytes: int = 512
    wait_bytes: int = 1 << 20
    _growing: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_bytes(self.small_bytes, "small_bytes", most=1024)
        check_bytes(self.wait_bytes, "wait_bytes", most=2**63 - 1)

    def run(self, trace: Trace, limit_bytes: int) -> Course:
        """As of the base."""
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
    """A pool on a device without memory, which plans when it is told to, and what puts the trace through it.

    Args:
        trace: its marks "step", "begin" and "end" are iterations' ends, expected from the beginning.
        device: where the pool takes its memory.
        limit_bytes: of the device; what is larger is not served.
        options: further ones of the pool.
    """
    marks = _marks(trace)
    with _Pool(device, background=False, **options) as pool:
        if (marks >= 0).any():
            pool.expect_marks()  # as `mempool.torch.TensorPool.watch` does
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
    """Of each event the mark that the pool knows, or -1."""
    number = np.full(len(trace.names) + 1, -1, np.int8)  # the last one is that of no name
    for at, name in enumerate(trace.names):
        if name in MARKS:
            number[at] = MARKS.index(name)
    own = (trace.kind == Kind.MARK) & (trace.category < 0)
    return np.where(own, number[trace.operation], np.int8(-1))


@dataclass(frozen=True)
class PlannedGrowing(PlannedOnline):
    """The same on growing memory, which comes and goes by pages of 2 MiB."""

    _growing: ClassVar[bool] = True


#: Classes of settings by name, in the order in which comparisons show them.
ALLOCATORS: Mapping[str, type[Allocator]] = types.MappingProxyType(
    {**simulators.ALLOCATORS, "planned_online": PlannedOnline, "planned_growing": PlannedGrowing}
)


def simulate(
    trace: Trace, allocator: str, *, limit_bytes: int | None = None, **parameters: Any
) -> Simulation:
    """As `solvers.simulators.simulate`, with our own pool among the allocators."""
    return simulators.simulate(trace, allocator, limit_bytes=limit_bytes, allocators=ALLOCATORS, **parameters)
