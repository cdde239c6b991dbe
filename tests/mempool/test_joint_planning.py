"""Joint plans of marked iterations of several variants, any of which may follow any other."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import programs
import pytest
from combinations import combinations
from pools import simulated
from random_variants import at_random, in_steps, in_turn, marking_last, misses, variants, with_states

from mempool import Pool
from mempool.planning.options import OPTIONS
from mempool.planning.plan_builder import PlanBuilder
from mempool.planning.plan_files import read_plans

#: Number of iterations until all plans are final, with a run of the planner after each iteration.
LEARNED = 80


def gradient_program(
    memory: programs.Watched, scale_of: Callable[[int], int], late: Callable[[int], bool]
) -> Callable[[int], None]:
    """Keep gradients that the next iteration frees first or, if ``late``, last; the sizes are the same."""
    gradients: list[int] = []

    def iteration(number: int) -> None:
        scale = scale_of(number)
        first = memory.allocate(3 * scale)
        for at_last in (False, True):
            if at_last:
                programs.layers(memory, scale=scale)
            while gradients and at_last == late(number):
                memory.free(gradients.pop())
        gradients.extend(memory.allocate(scale * part) for part in (3, 7, 5))
        memory.free(first)

    return iteration


def run_in_regions(pool: Pool, iteration: Callable[[int], None], count: int, *, first: int = 0) -> None:
    """Run like `run`, in regions, with a buffer of a different size between regions each time."""
    for number in range(first, first + count):
        with pool.iteration():
            iteration(number)
        pool.free(pool.allocate(5000 + 64 * (number * number % 101)))
        pool.plan_now()


@contextlib.contextmanager
def program(plan: Path | None = None) -> Iterator[tuple[Pool, programs.Watched]]:
    with Pool(simulated(), background=False, plan=plan) as pool:
        memory = programs.Watched(pool)
        yield pool, memory
        memory.free_all()
        memory.free_all()


@pytest.fixture
def memory(pool: Pool) -> Iterator[programs.Watched]:
    memory = programs.Watched(pool)
    yield memory
    memory.free_all()


@pytest.mark.parametrize(
    ("scales", "late", "order", "work"),
    combinations(
        [(1024, 1700), (1024, 1024, 1500), (900, 1300, 1900, 2500)],
        [False, True],
        [in_turn, at_random],
        [in_steps, run_in_regions],
        every=11,
    ),
)
def test_joint_plans_of_variants_in_any_order_have_no_misses(
    pool: Pool,
    memory: programs.Watched,
    scales: tuple[int, ...],
    late: bool,
    order: Callable[[tuple[int, ...]], Callable[[int], int]],
    work: Callable[..., None],
) -> None:
    iteration = variants(memory, order(scales), late=late)
    work(pool, iteration, LEARNED)
    assert misses(pool, lambda: work(pool, iteration, 200, first=LEARNED)) == 0
    assert len(pool.planner.learner.registry) == len(set(scales))


@pytest.mark.parametrize(("late", "order"), [(False, at_random), (True, in_turn)])
def test_variants_of_different_lengths_have_no_misses_and_few_replans(
    pool: Pool, memory: programs.Watched, late: bool, order: Callable[[tuple[int, ...]], Callable[[int], int]]
) -> None:
    iteration = variants(memory, order((1000, 1300, 2600)), late=late, long=True)
    in_steps(pool, iteration, 2 * LEARNED)
    plans = pool.plans
    assert misses(pool, lambda: in_steps(pool, iteration, 200, first=2 * LEARNED)) == 0
    assert pool.plans == plans <= 15


def test_separate_plans_of_variants_would_miss(
    pool: Pool, memory: programs.Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves that the tests above have power."""
    monkeypatch.setitem(vars(OPTIONS), "joint_collisions", 1 << 60)
    iteration = variants(memory, at_random((900, 1300, 1900)))
    in_steps(pool, iteration, LEARNED)
    assert misses(pool, lambda: in_steps(pool, iteration, 200, first=LEARNED)) > 200


def test_joint_arena_is_hardly_larger_than_the_largest_variants_arena(
    pool: Pool, memory: programs.Watched
) -> None:
    iteration = variants(memory, at_random((900, 1300, 1900, 2500)), late=True)
    in_steps(pool, iteration, LEARNED)
    assert pool.report().to_dict()["arena_bytes"] <= 1.02 * memory.peak


def test_buffers_with_random_lifetimes_are_left_unplanned(pool: Pool, memory: programs.Watched) -> None:
    """Gradients accumulated for a random while: all other buffers hit."""
    chance = random.Random(2)
    order, gathered = at_random((900, 1300)), list[int]()

    def iteration(number: int) -> None:
        programs.layers(memory, scale=order(number))
        gradients = [memory.allocate(part * order(number)) for part in (31, 47)]
        if not gathered:
            gathered.extend(gradients)
        else:
            for gradient in gradients:
                memory.free(gradient)
        fresh = memory.allocate(5000)
        if chance.random() < 0.2:  # the optimizer's step; the iteration is the same up to here without it
            for _ in range(3):
                memory.free(memory.allocate(7 * order(number)))
            while gathered:
                memory.free(gathered.pop())
        memory.free(fresh)

    in_steps(pool, iteration, 3 * LEARNED)
    assert misses(pool, lambda: in_steps(pool, iteration, 200, first=3 * LEARNED)) == 0
    assert pool.report().to_dict()["coverage"] < 0.99  # and it says so
    assert pool.client.stats()["outcomes"]["hit"] > 100 * 200


def test_marks_win_over_patterns_detected_earlier(pool: Pool, memory: programs.Watched) -> None:
    """A short loop within the first iteration is no variant."""
    order = at_random((900, 1300, 1900))
    iteration = variants(memory, order)

    def looping(number: int) -> None:
        for _ in range(12):
            held = [memory.allocate(600 + 64 * part) for part in range(8)]
            for one in held:
                memory.free(one)
            if number == 0:
                pool.plan_now()
        iteration(number)

    looping(0)
    assert pool.plans > 0
    in_steps(pool, looping, LEARNED, first=1)
    assert misses(pool, lambda: in_steps(pool, looping, 200, first=LEARNED)) == 0
    assert len({len(known.buffers) for known in pool.planner.learner.registry}) == 1


def saved(path: Path, order: Callable[[int], int], **how: bool) -> None:
    """Save the plans learned of these variants to a file."""
    with program() as (pool, memory):
        in_steps(pool, variants(memory, order, **how), 2 * LEARNED)
        assert pool.planner.learner.builder.joint
        pool.save(path)


@pytest.mark.parametrize(
    ("work", "first", "late", "long"),  # the first iteration is of any variant
    combinations([in_steps, marking_last], [0, 1, 3], [False, True], [False, True], every=11),
)
def test_saved_joint_plans_hit_from_the_first_iteration_of_the_recorded_variant(
    tmp_path: Path, work: Callable[..., None], first: int, late: bool, long: bool
) -> None:
    """With another variant in the first iteration, from the second on."""
    order = at_random((900, 1300, 1900))

    def iteration_of(memory: programs.Watched) -> Callable[[int], None]:
        return with_states(memory, variants(memory, order, late=late, long=long))

    with program() as (pool, memory):
        work(pool, iteration_of(memory), 2 * LEARNED)
        pool.save(tmp_path / "plan")
    with program(tmp_path / "plan") as (pool, memory):
        iteration = iteration_of(memory)
        warm_up = misses(pool, lambda: work(pool, iteration, 1, first=first))
        assert (warm_up == 0) == (first == 0)
        assert misses(pool, lambda: work(pool, iteration, 3 * LEARNED, first=first + 1)) == 0
        assert pool.plans == 0
        assert pool.client.stats()["outcomes"]["hit"] > 0


def test_another_variant_replans_saved_joint_plans(tmp_path: Path) -> None:
    saved(tmp_path / "plan", at_random((900, 1300)))
    order = at_random((900, 1300, 1900))
    with program(tmp_path / "plan") as (pool, memory):
        iteration = variants(memory, order)
        in_steps(pool, iteration, 2 * LEARNED)
        assert misses(pool, lambda: in_steps(pool, iteration, 200, first=2 * LEARNED)) == 0
        assert len(pool.planner.learner.builder.joint._plans) == 3


def test_longer_lifetimes_replan_saved_joint_plans(tmp_path: Path) -> None:
    """The second program has the same sizes."""
    order = at_random((900, 1300, 1900))
    with program() as (pool, memory):
        in_steps(pool, gradient_program(memory, order, lambda _: False), 2 * LEARNED)
        assert pool.planner.learner.builder.joint
        pool.save(tmp_path / "plan")
    with program(tmp_path / "plan") as (pool, memory):
        iteration = gradient_program(memory, order, lambda _: True)
        in_steps(pool, iteration, 3 * LEARNED)
        assert misses(pool, lambda: in_steps(pool, iteration, 200, first=3 * LEARNED)) == 0
        assert pool.plans > 0


def test_saved_plans_are_the_plans_in_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected replacements are not saved. Gradients are freed later from some iteration on."""
    order = at_random((900, 1300, 1900))
    with program() as (pool, memory):
        iteration = gradient_program(memory, order, lambda number: number >= 2 * LEARNED)
        in_steps(pool, iteration, 2 * LEARNED)
        in_effect = list(pool.planner.learner.registry)
        tried = []
        monkeypatch.setattr(PlanBuilder, "fits_memory", lambda *made: tried.append(made))
        in_steps(pool, iteration, 30, first=2 * LEARNED)
        assert tried
        pool.save(tmp_path / "plan")
    again = read_plans(tmp_path / "plan")
    assert {one.key for one in again.plans} == {one.key for one in in_effect}
    assert len(again.variants) == 3


def test_variant_of_long_ago_blocks_no_variant(pool: Pool, memory: programs.Watched) -> None:
    """The recording no longer shows the variants that followed."""
    order = at_random((900, 1300, 1900))
    iteration = variants(memory, lambda number: 700 if number < 200 else order(number))
    in_steps(pool, iteration, 200 + 2 * LEARNED)
    assert misses(pool, lambda: in_steps(pool, iteration, 200, first=200 + 2 * LEARNED)) == 0


def test_another_client_on_the_memory_keeps_the_joint_plans(pool: Pool, memory: programs.Watched) -> None:
    """All joint plans are made anew beside the plans of the other client."""
    iteration = variants(memory, at_random((900, 1300, 1900)))
    in_steps(pool, iteration, LEARNED)
    with Pool(name="other", share=pool, background=False) as other:

        def iterate_both(number: int) -> None:
            other.step()
            held = [other.allocate(size) for size in (30_000, 50_000, 20_000)]
            iteration(number)
            for address in held:
                other.free(address)
            other.plan_now()

        in_steps(pool, iterate_both, 3 * LEARNED, first=LEARNED)
        assert misses(pool, lambda: in_steps(pool, iterate_both, 100, first=4 * LEARNED)) == 0
        assert pool.planner.learner.builder.joint


def test_more_variants_than_can_be_known_are_not_planned_again_and_again(
    pool: Pool, memory: programs.Watched
) -> None:
    iteration = variants(memory, at_random(tuple(range(800, 800 + 20 * 100, 100))))
    in_steps(pool, iteration, LEARNED)
    plans = pool.plans
    in_steps(pool, iteration, 150, first=LEARNED)
    assert pool.plans <= plans + 24
