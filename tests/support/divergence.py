"""Divergence from a plan: training loops with differing iterations, served by a pool and its planner."""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pools
from sequences import Diverged, Iteration, Network, Player, allocations, network

from mempool import _core
from mempool.planning.planner_thread import Planner, ProcessorBudget
from mempool.settings import EVERYTHING

#: Iterations before the first difference; differences; iterations between two at most, beside one after each.
STEADY, DIFFERENCES, MOST_BETWEEN = 12, 16, 4
#: Hits in a row after which the pool has recovered.
RECOVERED = 16


class Planning:
    """A pool's core with the real planner, which runs after every few allocations instead of in a thread.

    Plans depend on the program alone: looking costs nothing.
    """

    def __init__(self, *, marks: bool = True, every: int = 50, events: int = 1 << 16) -> None:
        """Start a recording.

        Args:
            marks: whether the program's marks are passed on.
            every: allocations between two of the planner's rounds.
            events: capacity of the recording.
        """
        device = pools.simulated()
        self.core = _core.Pool(device=device, recorded_events=events)
        self.core.set_retained_limit(EVERYTHING)
        self.client = _core.Client(self.core, "pool")
        self.planner = Planner(self.client, device, small_bytes=512)
        self.planner.budget = ProcessorBudget(allowance=1e9, share=0, most_debt=0)
        self.planner.learner.begin()
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
            self.client.ignore_time()  # the planner has a thread of its own in a pool
        return self.client.allocate(size)

    def free(self, address: int) -> None:
        assert self.client.free(address)


class Watcher:
    """An observer between a program and its memory: no two live buffers overlap, and hits are counted.

    Attributes:
        hits: for each allocation, whether it was served at its planned address.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._begins: list[int] = []
        self._ends: list[int] = []
        self.hits: list[bool] = []

    def allocate(self, size: int) -> int:
        before = self._memory.hits
        address: int = self._memory.allocate(size)
        self.hits.append(self._memory.hits > before)
        at = bisect.bisect_right(self._begins, address)
        assert at == 0 or self._ends[at - 1] <= address
        assert at == len(self._begins) or address + size <= self._begins[at]
        self._begins.insert(at, address)
        self._ends.insert(at, address + size)
        return address

    def free(self, address: int) -> None:
        at = bisect.bisect_left(self._begins, address)
        assert self._begins[at] == address
        del self._begins[at], self._ends[at]
        self._memory.free(address)


@dataclass
class Cost:
    """Cost of differences, summed over played loops.

    Attributes:
        allocations: in differing iterations, and in the one after each.
        hits: of these.
        recoveries: for each difference, allocations from it to the first of `RECOVERED` hits in a row.
    """

    allocations: int = 0
    hits: int = 0
    recoveries: list[int] = field(default_factory=list)


def add_cost(
    cost: Cost,
    own: Network,
    kind: Callable[[Network, random.Random], Diverged],
    seed: int,
    *,
    marks: bool = True,
) -> None:
    """Play a network's training loop with one kind of difference."""
    memory = Planning(marks=marks)
    watcher = Watcher(memory)
    player, rng = Player(watcher), random.Random(seed)
    watched: list[int] = []
    changes: list[int] = []

    def play(iteration: Iteration, *, raises: bool = False) -> range:
        begin = len(watcher.hits)
        memory.mark()
        player.play(iteration, raises=raises)
        return range(begin, len(watcher.hits))

    for _ in range(STEADY):
        play(own.train)
    for _ in range(DIFFERENCES):
        for _ in range(rng.randrange(MOST_BETWEEN + 1)):
            play(own.train)
        diverged = kind(own, rng)
        changes.append(len(watcher.hits) + allocations(diverged.iteration[: diverged.place]))
        watched += play(diverged.iteration, raises=diverged.raises)
        watched += play(own.train)
    cost.allocations += len(watched)
    cost.hits += sum(watcher.hits[at] for at in watched)
    cost.recoveries += [_recovery(watcher.hits, change) for change in changes]
    player.free_all()


def cost_of(
    names: list[str],
    kind: Callable[[Network, random.Random], Diverged],
    seed: int,
    *,
    marks: bool = True,
) -> Cost:
    """Return the cost of one kind of difference in the loops of some networks."""
    cost = Cost()
    for name in names:
        add_cost(cost, network(name), kind, seed, marks=marks)
    return cost


def _recovery(hits: list[bool], change: int) -> int:
    row = 0
    for at in range(change, len(hits)):
        row = row + 1 if hits[at] else 0
        if row == RECOVERED:
            return at + 1 - RECOVERED - change
    return len(hits) - change
