"""Iterations of more sizes than are worth a plan each have one plan, with places for the largest."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import programs
import pytest
from cores import Core, pattern
from hypothesis import given
from hypothesis import strategies as st
from pools import run, simulated

from mempool import Pool
from mempool.plan_files import read_saved
from solvers import read_plan, write_plan
from solvers.store import read_plan_columns
from traces import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MOST = [16_000, 4000, 36_000, 2800, 120_000, 8000, 6000, 24_000, 3200, 48_000]
#: Those of up to 4000 bytes never vary.
LEAST = [size if size <= 4000 else size // 4 for size in MOST]


@pytest.fixture
def core() -> Core:
    made = Core()
    made.client.load(None, pattern(MOST, least=LEAST))
    made.step()
    return made


def scaled(share: float) -> list[int]:
    return [max(least, int(most * share)) for least, most in zip(LEAST, MOST, strict=True)]


@pytest.mark.parametrize("share", [0.25, 0.3, 0.7, 0.99, 1.0])
def test_each_size_within_it_has_its_place(core: Core, share: float) -> None:
    for _ in range(3):
        assert core.run(scaled(share)) == len(MOST)
        core.step()


@given(st.lists(st.tuples(st.floats(0, 1.3), st.booleans()), max_size=30), st.data())
def test_whatever_comes_no_two_buffers_overlap(
    iterations: list[tuple[float, bool]], data: st.DataObject
) -> None:
    """`Core` looks; places are shared, some buffers are kept, and some are larger than any place."""
    core = Core()
    ends = np.cumsum([-(-size // 512) * 512 for size in MOST])
    offsets = [0, *ends[:-1].tolist()]
    offsets[5:] = [offset - offsets[5] for offset in offsets[5:]]  # the second half where the first one was
    core.client.install(pattern(MOST, offsets, least=LEAST))
    kept = []
    for share, marked in iterations:
        if marked:
            core.step()
        sizes = [
            int(most * share) + 1 if least != most else most for least, most in zip(LEAST, MOST, strict=True)
        ]
        for half in (sizes[:5], sizes[5:]):
            made = [core.allocate(size) for size in half]
            stays = data.draw(st.sampled_from([None, None, None, 0, 2, 4]))
            for number, address in enumerate(made):
                if number == stays:
                    kept.append(address)
                else:
                    core.free(address)
        while len(kept) > 3:
            core.free(kept.pop(0))


@pytest.mark.parametrize("position", [0, 4, 9])
def test_what_is_larger_than_its_place_gets_none(core: Core, position: int) -> None:
    sizes = list(MOST)
    sizes[position] += 1
    assert core.run(sizes) == len(MOST) - 1
    assert core.outcomes["other_size"] == 1


def test_nor_what_is_smaller_than_the_least(core: Core) -> None:
    sizes = list(MOST)
    sizes[4] = LEAST[4] - 1
    assert core.run(sizes) == len(MOST) - 1


def test_what_never_varies_must_have_its_size(core: Core) -> None:
    sizes = list(MOST)
    sizes[1] -= 1
    assert core.run(sizes) == len(MOST) - 1


@pytest.mark.parametrize("place", range(len(MOST)))
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_an_extra_allocation_costs_two_misses_at_most(core: Core, place: int, share: float) -> None:
    """It may take another one's place; sizes that never vary tell."""
    for extra in (600, 999_000):
        sizes = scaled(share)
        assert core.run([*sizes[:place], extra, *sizes[place:]]) >= len(MOST) - 1
        core.step()
    assert core.misses <= 4


def test_what_lies_behind_a_smaller_buffer_is_no_hindrance(core: Core) -> None:
    """In the part of a place that the largest would need."""
    hole = core.allocate(999_000)  # so that positions are counted on
    core.free(hole)
    core.step()
    small = core.allocate(LEAST[0])  # 4000 of the 16,000 bytes of its place
    core.client.enter_dynamic()
    place = core.pool.arena_ranges()[0][0] + 4096
    core.client.place_next(place)
    behind = core.allocate(1024)
    core.client.leave_dynamic()
    assert (place, place + 1024) in core.pool.arena_ranges()
    core.free(small)
    core.step()
    before = core.hits
    core.free(core.allocate(LEAST[0]))
    assert core.hits == before + 1
    core.step()
    core.free(core.allocate(MOST[0]))
    assert core.hits == before + 1
    assert core.outcomes["occupied"] == 1
    core.free(behind)


def test_it_takes_the_place_of_plans_that_it_serves() -> None:
    core = Core()
    for share in (0.3, 0.6, 1.0):
        core.client.install(pattern(scaled(share)))
    core.client.install(pattern([size + 5 for size in MOST]))
    assert core.client.patterns() == 4
    core.client.install(pattern(MOST, least=LEAST))
    assert core.client.patterns() == 2


@pytest.mark.parametrize("least", [[0] * len(MOST), [size + 1 for size in MOST], LEAST[1:]])
def test_a_wrong_least_size(least: list[int]) -> None:
    with pytest.raises(ValueError, match="least size"):
        pattern(MOST, least=least)


def test_a_part_without_least_sizes() -> None:
    made = pattern(MOST, least=LEAST)
    made.add_table(sequence=1, stream=0, sizes=np.array([600]), offsets=np.array([[0]]))
    with pytest.raises(ValueError, match="each table has least sizes"):
        Core().client.install(made)
    with pytest.raises(ValueError, match="is no warm-up"):
        Core().client.load(pattern(MOST, least=LEAST, cyclic=False), pattern(MOST))


# --- with the planner


def batches(
    memory: programs.Watched, length_of: Callable[[int], int], *, each: tuple[int, ...] = (3, 11, 7, 5)
) -> Callable[[int], None]:
    """Weights' gradients, which do not vary and outlive the iteration, between activations, which do."""
    gradients: list[int] = []
    outputs: list[int] = []

    def iteration(number: int) -> None:
        length = length_of(number)
        activations = []
        for layer in range(6):
            activations.extend(memory.allocate(64 * length * (part + layer)) for part in each)
            memory.free(activations.pop(-2))
        outputs.append(memory.allocate(640 * length))
        while gradients:
            memory.free(gradients.pop())
        while activations:
            gradients.append(memory.allocate(4096 + 512 * len(activations)))
            memory.free(activations.pop())
        if len(outputs) > 1:
            memory.free(outputs.pop(0))

    return iteration


def any_length(number: int) -> int:
    return random.Random(number).randrange(100, 1000)


LEARNED = 80


def missed(pool: Pool, iteration: Callable[[int], None], first: int, count: int) -> dict[str, int]:
    before = pool.client.stats()["outcomes"]
    run(pool, iteration, count, marks=True, first=first)
    after = pool.client.stats()["outcomes"]
    return {
        name: after[name] - before[name] for name in after if name != "hit" and after[name] != before[name]
    }


def test_iterations_of_any_length_hit() -> None:
    with Pool(simulated(), background=False) as pool:
        iteration = batches(programs.Watched(pool), any_length)
        run(pool, iteration, LEARNED, marks=True)
        seen = max(any_length(number) for number in range(LEARNED))
        later = [number for number in range(LEARNED, 2 * LEARNED) if any_length(number) <= seen]
        assert len({any_length(number) for number in later}) > 60
        assert missed(pool, lambda number: iteration(later[number]), 0, len(later)) == {}


def test_one_longer_than_any_is_planned_for_when_it_came_while_all_is_recorded() -> None:
    """That is at first, and from the first miss on."""
    with Pool(simulated(), background=False) as pool:
        longest = {60: 2000, 90: 3000}
        iteration = batches(programs.Watched(pool), lambda number: longest.get(number, any_length(number)))
        run(pool, iteration, 60, marks=True)
        assert not pool.client.state()["recording"]
        for number in list(longest):
            assert sum(missed(pool, iteration, number, 1).values()) > 20
            run(pool, iteration, 29, marks=True, first=number + 1)
        longest[120] = 3000
        assert missed(pool, iteration, 120, 1) == {}
        run(pool, iteration, 230, marks=True, first=121)
        longest[351] = 3000  # which has long not been in any recording
        assert missed(pool, iteration, 351, 1) == {}


def test_the_arena_is_that_of_the_largest() -> None:
    def arena(length_of: Callable[[int], int]) -> int:
        with Pool(simulated(), background=False) as pool:
            run(pool, batches(programs.Watched(pool), length_of), LEARNED, marks=True)
            return int(pool.core.stats()["arena_bytes"])

    longest = max(any_length(number) for number in range(LEARNED))
    assert arena(any_length) <= 1.02 * arena(lambda _: longest)


def test_lengths_that_get_few_again_stay_in_it() -> None:
    """No plan of their own, which would have other places for what lives on."""
    with Pool(simulated(), background=False) as pool:
        iteration = batches(
            programs.Watched(pool), lambda n: any_length(n) if n < LEARNED else any_length(n % 2)
        )
        run(pool, iteration, LEARNED, marks=True)
        made = pool.plans
        assert missed(pool, iteration, LEARNED, 100) == {}
        assert pool.plans == made


def test_beside_iterations_of_another_kind() -> None:
    with Pool(simulated(), background=False) as pool:
        memory = programs.Watched(pool)
        training = batches(memory, any_length)

        def iteration(number: int) -> None:
            if number % 5 == 4:
                programs.layers(memory, 9, scale=3000)
            else:
                training(number)

        run(pool, iteration, 3 * LEARNED, marks=True)
        seen = max(any_length(number) for number in range(3 * LEARNED))
        later = [number for number in range(250, 300) if any_length(number) <= seen]
        lost = missed(pool, lambda number: iteration(later[number]), 0, len(later))
        # How many iterations the output of one that the other kind follows outlives, differs.
        assert lost.keys() <= {"dynamic"}
        assert lost.get("dynamic", 0) <= len(later)


def test_what_is_kept_longer_is_planned_for() -> None:
    with Pool(simulated(), background=False) as pool:
        memory = programs.Watched(pool)
        training = batches(memory, any_length)
        clones: list[int] = []

        def iteration(number: int) -> None:
            training(number)
            if number >= LEARNED:
                clones.append(memory.allocate(7777))
                if len(clones) > 3:
                    memory.free(clones.pop(0))

        run(pool, iteration, 2 * LEARNED, marks=True)
        seen = max(any_length(number) for number in range(LEARNED, 2 * LEARNED))
        later = [number for number in range(200, 260) if any_length(number) <= seen]
        assert missed(pool, lambda number: iteration(later[number]), 0, len(later)) == {}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.plan"
    with Pool(simulated(), background=False) as pool:
        run(pool, batches(programs.Watched(pool), any_length), LEARNED, marks=True)
        pool.save(path)
    return path


def test_a_saved_one_serves_other_lengths_from_the_second_iteration_on(saved: Path) -> None:
    assert any(plan.pattern.least is not None for plan in read_saved(saved).plans)
    with Pool(simulated(), background=False, plan=saved) as pool:
        memory = programs.Watched(pool)
        state = [memory.allocate(4096 + 512 * k) for k in range(24)]  # looks like gradients, and stays
        iteration = batches(memory, lambda number: 150 + 10 * number)
        run(pool, iteration, 1, marks=False)
        assert missed(pool, iteration, 1, 40) == {}
        assert len(state) == 24


def test_a_region_that_begins_the_program_is_not_served_yet(saved: Path) -> None:
    """An optimizer's state may be made in it."""
    with Pool(simulated(), background=False, plan=saved) as pool:
        memory = programs.Watched(pool)
        iteration = batches(memory, lambda number: 150 + 10 * number)
        hits = []
        for number in range(4):
            before = pool.client.stats()["outcomes"]["hit"]
            with pool.iteration():
                iteration(number)
            hits.append(pool.client.stats()["outcomes"]["hit"] - before)
        assert hits[0] == 0
        assert hits[1] > 0
        assert hits[3] == 43


@pytest.mark.parametrize(
    ("least", "says"),
    [
        (lambda least: least[:-1], "the least size is not a column of"),
        (lambda least: least * 0, "the least size is out of range"),
        (lambda least: least + 10**9, "a least size is larger than the largest"),
        (lambda least: least * 0.5, "the least size holds something else"),
    ],
)
def test_a_damaged_file(
    saved: Path, tmp_path: Path, least: Callable[[np.ndarray], object], says: str
) -> None:
    plan, buffers, extra = read_plan(saved)
    columns = read_plan_columns(saved)
    path = tmp_path / "damaged.plan"
    write_plan(plan, buffers, path, extra=extra, extra_columns={**columns, "least": least(columns["least"])})
    with pytest.raises(TraceError, match=says):
        Pool(simulated(), background=False, plan=path)
