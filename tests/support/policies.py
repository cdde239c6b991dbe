"""What decides at which planned address an allocation is served: the pool, and naive policies beside it."""

from __future__ import annotations

import bisect
from typing import Protocol

import pools

from mempool import _core
from mempool.planning.planned_pattern import PlannedPattern
from mempool.planning.planner_thread import Planner, ProcessorBudget, first_cache_bytes

ALIGNMENT = 64
ARENA = 1 << 50  # where the naive policies' arena lies: above all that the simulated device hands out


class Policy(Protocol):
    """Serves a program's allocations.

    Attributes:
        hits: allocations served at a planned address.
    """

    hits: int

    def allocate(self, size: int) -> int:
        """An address."""

    def free(self, address: int) -> None:
        """The buffer goes."""

    def mark(self) -> None:
        """An iteration begins."""

    def reset_peak(self) -> None:
        """Forget what was held before."""

    def reserved_peak(self) -> int:
        """Bytes held from the device at most."""


class Ranges:
    """Disjoint address ranges."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def overlaps(self, begin: int, size: int) -> bool:
        """Whether one of them does."""
        at = bisect.bisect_right(self._begins, begin)
        before = at > 0 and self._ends[at - 1] > begin
        return before or (at < len(self._begins) and self._begins[at] < begin + size)

    def add(self, begin: int, size: int) -> None:
        at = bisect.bisect_right(self._begins, begin)
        self._begins.insert(at, begin)
        self._ends.insert(at, begin + size)

    def remove(self, begin: int) -> None:
        at = bisect.bisect_left(self._begins, begin)
        del self._begins[at], self._ends[at]


class Index:
    """The k-th allocation since the mark gets the k-th planned address, whatever else is true."""

    def __init__(self, planned: PlannedPattern) -> None:
        self._planned, self._iteration, self._index = planned, -1, 0
        self._core = _core.Pool(device=pools.simulated())
        self._client = _core.Client(self._core, "naive")
        self.hits = 0

    def mark(self) -> None:
        self._iteration, self._index = self._iteration + 1, 0

    def allocate(self, size: int) -> int:
        address = self._planned_address(size)
        if address is None:
            return self._client.allocate(size)
        self.hits += 1
        return address

    def _planned_address(self, size: int) -> int | None:
        del size
        offsets = self._planned.plan.offset
        assert offsets is not None
        at, self._index = self._index, self._index + 1
        if at >= len(offsets) or (offset := int(offsets[at, self._iteration % offsets.shape[1]])) < 0:
            return None
        return ARENA + offset

    def free(self, address: int) -> None:
        if address < ARENA:
            assert self._client.free(address)

    def reset_peak(self) -> None:
        self._client.reset_peaks()

    def reserved_peak(self) -> int:
        return self._planned.plan.arena_bytes + int(_core.usage(self._core)["recent_peak_bytes"])


class GuardedIndex(Index):
    """The same, if its size is the planned one and nothing alive lies there."""

    def __init__(self, planned: PlannedPattern) -> None:
        super().__init__(planned)
        self._taken = Ranges()

    def _planned_address(self, size: int) -> int | None:
        at = self._index
        address = super()._planned_address(size)
        if (
            address is None
            or int(self._planned.buffers.size[at]) != size
            or self._taken.overlaps(address, size)
        ):
            return None
        self._taken.add(address, size)
        return address

    def free(self, address: int) -> None:
        if address >= ARENA:
            self._taken.remove(address)
        super().free(address)


class Planning:
    """A pool's core with the real planner, at work now and then as its thread would be.

    What is planned depends on the program alone: looking costs nothing.
    """

    def __init__(self, *, marks: bool = True, every: int = 50, events: int = 1 << 16) -> None:
        """Begin to record.

        Args:
            marks: whether the program's marks are passed on.
            every: allocations between two of the planner's rounds.
            events: what the recording holds.
        """
        device = pools.simulated()
        self.core = _core.Pool(device=device, recorded_events=events)
        self.core.set_retained_limit(first_cache_bytes(device))
        self.client = _core.Client(self.core, "pool")
        self.planner = Planner(self.core, self.client, device, small_bytes=512)
        self.planner.budget = ProcessorBudget(allowance=1e9, share=0, most_debt=0)
        self.planner.begin()
        self._marks, self._every, self._since = marks, every, 0

    @property
    def hits(self) -> int:
        return int(self.client.stats()["outcomes"]["hit"])

    def mark(self) -> None:
        if self._marks:
            self.client.mark(_core.Mark.STEP)

    def allocate(self, size: int) -> int:
        self._since += 1
        if self._since >= self._every:
            self._since = 0
            self.planner.run_once(1e-6)
        return self.client.allocate(size)

    def free(self, address: int) -> None:
        assert self.client.free(address)

    def reset_peak(self) -> None:
        self.core.trim()
        self.client.reset_peaks()

    def reserved_peak(self) -> int:
        return int(_core.usage(self.core)["recent_peak_bytes"])
