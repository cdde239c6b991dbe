"""Programs with variants of iterations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import programs
from pools import run

from mempool import Pool
from solvers import Plan
from solvers.packing.variants import IterationVariant
from traces.buffers import Buffers


def random_variants(
    seed: int, count: int, *, deep: bool, alike: int = 0, calm: bool = False, long: int = 14
) -> list[IterationVariant]:
    """Return random iteration variants.

    Args:
        seed: seed of the random numbers.
        count: number of variants.
        deep: let some buffers live through the whole next iteration, and longer.
        alike: number of common allocations at the beginning.
        calm: let few buffers outlive their iteration.
        long: upper bound on the number of allocations.
    """
    rng = np.random.default_rng(seed)
    beginning = rng.integers(1, 40, alike) * 64
    variants = []
    lengths = rng.integers(long // 2 if calm else 1, long, count)
    for n in lengths.tolist():
        end = np.arange(n) + rng.integers(1, max(n // 2, 2), n)
        size = rng.integers(1, 40, n) * 64
        size[: min(alike, n)] = beginning[: min(alike, n)]
        reach = rng.integers(0, lengths + 1, (n, count))
        if deep:
            reach += (rng.random((n, count)) < 0.1) * rng.integers(0, lengths.min() + 1, (n, count))
        outlives = rng.random(n) < 0.05 if calm else (end >= n) | (rng.random(n) < 0.2)
        reach = np.where(outlives[:, None], reach, 0)
        end = np.where(outlives, n + 1, end)
        persistent = rng.random(n) < 0.1
        buffers = Buffers.of(np.arange(n), end, size, alignment=64, persistent=persistent, period=n)
        variants.append(IterationVariant(buffers, reach, np.zeros(n, np.int64)))
    return variants


def replayed_peak(variants: Sequence[IterationVariant], plans: Sequence[Plan], order: Sequence[int]) -> int:
    """Return the peak load of a succession of variants; assert that no two live buffers overlap."""
    live: dict[tuple[int, int], tuple[int, int, int]] = {}  # (iteration, row) -> begin, end, when it is freed
    most = 0
    begins = np.append(0, np.cumsum([len(variants[k]) for k in order]))
    for iteration, (k, follower) in enumerate(zip(order, [*order[1:], order[-1]], strict=True)):
        variant, offset = variants[k], plans[k].offset
        assert offset is not None
        for row in range(len(variant)):
            now = int(begins[iteration]) + row
            live = {key: value for key, value in live.items() if value[2] > now}
            if variant.buffers.persistent[row]:
                continue
            over = int(begins[iteration]) + min(int(variant.buffers.end[row]), len(variant))
            if variant.reach[row].any():
                over = int(begins[iteration + 1]) + int(variant.reach[row, follower])
            if over <= now:
                continue
            begin = int(offset[row, iteration % plans[k].columns])
            end = begin + int(variant.buffers.size[row])
            for other, (low, high, _) in live.items():
                assert end <= low or high <= begin, f"{iteration}:{row} overlaps {other}"
            live[iteration, row] = begin, end, over
            most = max(most, sum(high - low for low, high, _ in live.values()))
    return most


def variants(
    memory: programs.Watched, scale_of: Callable[[int], int], *, late: bool = False, long: bool = False
) -> Callable[[int], None]:
    """Return an iteration that frees the previous gradients, and the previous output after its own output.

    Args:
        memory: allocator of the program.
        scale_of: scale of each iteration, which distinguishes the variants.
        late: free gradients in the middle of the next iteration.
        long: let larger iterations allocate more often, too.
    """
    gradients: list[int] = []
    outputs: list[int] = []

    def iteration(number: int) -> None:
        scale = scale_of(number)
        count = scale // 100 if long else 20
        first = memory.allocate(3 * scale)
        if late:
            programs.layers(memory, count, scale=scale)
        while gradients:
            memory.free(gradients.pop())
        programs.layers(memory, count, scale=scale)
        outputs.append(memory.allocate(20 * scale))
        if len(outputs) > 1:
            memory.free(outputs.pop(0))
        gradients.extend(memory.allocate(scale * part) for part in (3, 7, 5))
        memory.free(first)

    return iteration


def in_steps(pool: Pool, iteration: Callable[[int], None], count: int, *, first: int = 0) -> None:
    run(pool, iteration, count, marks=True, first=first)


def marking_last(pool: Pool, iteration: Callable[[int], None], count: int, *, first: int = 0) -> None:
    """Mark iterations at their end, like an optimizer's hook."""
    for number in range(first, first + count):
        iteration(number)
        pool.step()
        pool.plan_now()


def misses(pool: Pool, work: Callable[[], None]) -> int:
    """Return the misses during some work."""

    def so_far() -> int:
        outcomes = pool.client.stats()["outcomes"]
        return int(pool.report().to_dict()["misses_total"] + outcomes["unplanned"])

    before = so_far()
    work()
    return so_far() - before


def in_turn(scales: tuple[int, ...]) -> Callable[[int], int]:
    return lambda number: scales[number % len(scales)]


def at_random(scales: tuple[int, ...]) -> Callable[[int], int]:
    chance = random.Random(1)
    drawn = [chance.choice(scales) for _ in range(1000)]
    return drawn.__getitem__


def with_states(memory: programs.Watched, iteration: Callable[[int], None]) -> Callable[[int], None]:
    """Add an optimizer's temporaries and persistent states to an iteration."""
    states: list[int] = []

    def whole(number: int) -> None:
        iteration(number)
        for made_first in (False, True):
            for size in range(10_000, 12_000, 64):
                if not made_first:
                    memory.free(memory.allocate(size))
                elif len(states) < 32:
                    states.append(memory.allocate(size))

    return whole
