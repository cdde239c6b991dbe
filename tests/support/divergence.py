"""What divergence costs under a policy: a training loop some of whose iterations go otherwise."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from policies import GuardedIndex, Index, Planning, Policy, Ranges
from sequences import Diverged, Iteration, Network, Player, allocations, network

from mempool.planning.planned_pattern import PlannedPattern

#: Iterations before the first difference; differences; iterations between two at most, beside one after each.
STEADY, DIFFERENCES, MOST_BETWEEN = 12, 16, 4
#: Hits in a row after which a policy has recovered.
RECOVERED = 16

POLICIES: dict[str, Callable[[PlannedPattern], Policy]] = {
    "index": Index,
    "index + guard": GuardedIndex,
    "pool, marks": lambda _: Planning(),
    "pool, no marks": lambda _: Planning(marks=False),
}


@functools.cache
def planned(name: str) -> PlannedPattern:
    """The pool's plan of a network's iteration, begun at the mark."""
    policy = Planning()
    player = Player(policy)
    for _ in range(STEADY):
        policy.mark()
        player.play(network(name).train)
    assert policy.planner.planned is not None
    return policy.planner.planned


@dataclass
class Cost:
    """What differences cost, summed over what was played.

    Attributes:
        differences: iterations that went otherwise.
        allocations: in them, and in the one after each.
        hits: of these.
        overlaps: buffers handed out over something alive, ever.
        recoveries: for each difference, allocations from it to the first of `RECOVERED` hits in a row.
        reserved: peak bytes held, as a multiple of the peak load.
    """

    differences: int = 0
    allocations: int = 0
    hits: int = 0
    overlaps: int = 0
    recoveries: list[int] = field(default_factory=list)
    reserved: list[float] = field(default_factory=list)

    def add(self, other: Cost) -> None:
        self.differences += other.differences
        self.allocations += other.allocations
        self.hits += other.hits
        self.overlaps += other.overlaps
        self.recoveries += other.recoveries
        self.reserved += other.reserved

    def hit_rate(self) -> float:
        return self.hits / self.allocations


class Watcher:
    """Stands between a program and a policy, and counts for itself."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._ranges = Ranges()
        self._sizes: dict[int, int] = {}
        self._load = 0
        self.peak_load = self.overlaps = 0
        self.hits: list[bool] = []  # by allocation

    def allocate(self, size: int) -> int:
        before = self._policy.hits
        address = self._policy.allocate(size)
        self.hits.append(self._policy.hits > before)
        if self._ranges.overlaps(address, size):
            self.overlaps += 1
            return address  # nobody will know whose it is when it goes
        self._ranges.add(address, size)
        self._sizes[address] = size
        self._load += size
        self.peak_load = max(self.peak_load, self._load)
        return address

    def free(self, address: int) -> None:
        if address in self._sizes:
            self._ranges.remove(address)
            self._load -= self._sizes.pop(address)
        self._policy.free(address)


def cost(name: str, policy: str, kind: Callable[[Network, random.Random], Diverged], seed: int) -> Cost:
    """Play a network's training loop with one kind of difference."""
    served = POLICIES[policy](planned(name))
    watcher = Watcher(served)
    player = Player(watcher)
    own, rng = network(name), random.Random(seed)
    told, watched, changes = Cost(), [], []

    def play(iteration: Iteration, *, raises: bool = False) -> range:
        begin = len(watcher.hits)
        served.mark()
        player.play(iteration, raises=raises)
        return range(begin, len(watcher.hits))

    for _ in range(STEADY):
        play(own.train)
    served.reset_peak()
    for _ in range(DIFFERENCES):
        for _ in range(rng.randrange(MOST_BETWEEN + 1)):
            play(own.train)
        diverged = kind(own, rng)
        changes.append(len(watcher.hits) + allocations(diverged.iteration[: diverged.place]))
        watched += play(diverged.iteration, raises=diverged.raises)
        watched += play(own.train)
    told.differences = len(changes)
    told.allocations, told.hits = len(watched), sum(watcher.hits[at] for at in watched)
    told.overlaps = watcher.overlaps
    told.recoveries = [_recovery(watcher.hits, change) for change in changes]
    told.reserved = [served.reserved_peak() / watcher.peak_load]
    player.free_all()
    return told


def _recovery(hits: list[bool], change: int) -> int:
    row = 0
    for at in range(change, len(hits)):
        row = row + 1 if hits[at] else 0
        if row == RECOVERED:
            return at + 1 - RECOVERED - change
    return len(hits) - change
