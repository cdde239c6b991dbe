"""Programs whose marked iterations are of several kinds, and how often they miss."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import programs
from pools import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool import Pool


def kinds(
    memory: programs.Watched, scale_of: Callable[[int], int], *, late: bool = False, long: bool = False
) -> Callable[[int], None]:
    """Gradients that the next one frees first, or ``late``, and an output that it frees when it has its own.

    Args:
        memory: where they are made.
        scale_of: what tells kinds apart, of each iteration.
        late: gradients go only when the next iteration has made half of what it makes.
        long: larger ones allocate more often, too.
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
    """As an optimizer's hook does."""
    for number in range(first, first + count):
        iteration(number)
        pool.step()
        pool.plan_now()


def misses(pool: Pool, work: Callable[[], None]) -> int:
    """Of so much work."""

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
    """And temporaries of an optimizer, whose states are made behind the first of these, and stay."""
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
