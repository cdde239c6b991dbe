"""Programs with iteration variants, and their numbers of misses."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import programs
from pools import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool import Pool


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
