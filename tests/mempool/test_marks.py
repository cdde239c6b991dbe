"""Marks that hinder go unheard, and come back where it is no better without them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import programs
import pytest
from pools import run, simulated

from mempool import Pool
from mempool.marks import LOOKS, MARKS_BETWEEN_LOOKS, MOST_LOOKS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Marks after which marks that hinder go unheard, and after which that must have been better.
TRIED = (LOOKS + 1) * MARKS_BETWEEN_LOOKS
DECIDED = TRIED + MOST_LOOKS * MARKS_BETWEEN_LOOKS


def kinds(memory: programs.Watched, scale_of: Callable[[int], int]) -> Callable[[int], None]:
    """Gradients that the next iteration frees first, and an output that it frees when it has its own."""
    gradients: list[int] = []
    output: list[int] = []

    def iteration(number: int) -> None:
        scale = scale_of(number)
        while gradients:
            memory.free(gradients.pop())
        programs.layers(memory, scale=scale)
        fresh = memory.allocate(20 * scale)
        if output:
            memory.free(output.pop())
        output.append(fresh)
        gradients.extend(memory.allocate(scale * part) for part in (3, 7, 5))

    return iteration


def misses(pool: Pool, work: Callable[[], None]) -> int:
    """Of so much work."""
    before = pool.report().to_dict()["misses_total"] + pool.client.stats()["outcomes"]["unplanned"]
    work()
    return int(
        pool.report().to_dict()["misses_total"] + pool.client.stats()["outcomes"]["unplanned"] - before
    )


@pytest.mark.parametrize("scales", [(1024, 1700), (1024, 1024, 1500), (900, 1300, 1900)], ids=str)
def test_kinds_in_turn_have_no_misses_though_they_are_marked(pool: Pool, scales: tuple[int, ...]) -> None:
    memory = programs.Watched(pool)
    iteration = kinds(memory, lambda number: scales[number % len(scales)])
    run(pool, iteration, 40, marks=True)
    with_marks = misses(pool, lambda: run(pool, iteration, 20, marks=True, first=40))
    run(pool, iteration, DECIDED - 60, marks=True, first=60)
    assert with_marks > 0
    assert misses(pool, lambda: run(pool, iteration, 60, marks=True, first=DECIDED)) == 0
    assert not pool._marks.are_heard
    memory.free_all()


def in_regions(pool: Pool, iteration: Callable[[int], None], count: int, *, first: int = 0) -> None:
    """As `run`, in regions, and between them something of another size each time."""
    for number in range(first, first + count):
        with pool.iteration():
            iteration(number)
        pool.free(pool.allocate(5000 + 64 * (number * number % 101)))
        pool.plan_now()


@pytest.mark.parametrize("scales", [(1024, 1700), (1024, 1024, 1500)], ids=str)
def test_kinds_of_regions_in_turn_have_no_misses(pool: Pool, scales: tuple[int, ...]) -> None:
    memory = programs.Watched(pool)
    iteration = kinds(memory, lambda number: scales[number % len(scales)])
    in_regions(pool, iteration, 40)
    with_marks = misses(pool, lambda: in_regions(pool, iteration, 20, first=40))
    in_regions(pool, iteration, DECIDED - 60, first=60)
    assert with_marks > 0
    outside = pool.client.stats()["outcomes"]["outside"]
    assert misses(pool, lambda: in_regions(pool, iteration, 60, first=DECIDED)) == 0
    assert not pool._marks.are_heard
    assert pool.client.stats()["outcomes"]["outside"] - outside == 60  # what lies between them
    memory.free_all()


def test_kinds_in_no_order_have_their_marks_back(pool: Pool) -> None:
    """Without them hardly anything would hit."""
    memory, chance = programs.Watched(pool), random.Random(1)
    scales = [chance.choice((900, 1300, 1900, 2500)) for _ in range(3 * DECIDED)]
    iteration = kinds(memory, scales.__getitem__)
    run(pool, iteration, TRIED, marks=True)
    tried = not pool._marks.are_heard
    run(pool, iteration, DECIDED - TRIED + 64, marks=True, first=TRIED)
    assert tried
    assert pool._marks.are_heard
    outcomes = pool.client.stats()["outcomes"]["hit"]
    run(pool, iteration, DECIDED, marks=True, first=DECIDED + 64)
    assert pool.client.stats()["outcomes"]["hit"] - outcomes > 0.8 * 64 * DECIDED
    assert pool._marks.are_heard  # and they stay
    memory.free_all()


def test_one_kind_keeps_its_marks(pool: Pool) -> None:
    """Whatever is in the way of it now and then, as what a log keeps."""
    memory = programs.Watched(pool)
    iteration = kinds(memory, lambda _: 1024)
    run(pool, iteration, DECIDED, marks=True)
    assert pool._marks.are_heard
    memory.free_all()


def test_a_plan_that_was_made_without_them_is_followed_without_them(tmp_path: Path) -> None:
    scales = (1024, 1700)

    def trained(pool: Pool, count: int) -> int:
        memory = programs.Watched(pool)
        iteration = kinds(memory, lambda number: scales[number % 2])
        found = misses(pool, lambda: run(pool, iteration, count, marks=True))
        memory.free_all()
        return found

    path = tmp_path / "plan"
    with Pool(simulated(), background=False) as pool:
        trained(pool, DECIDED)
        pool.save(path)
    with Pool(simulated(), background=False, plan=path) as pool:
        assert not pool._marks.are_heard
        assert trained(pool, 20) < 2 * 66  # of twenty iterations, less than the first two
