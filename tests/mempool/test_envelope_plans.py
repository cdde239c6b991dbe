"""Envelopes: iterations of many sizes share one plan, whose slots fit the largest sizes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import programs
import pytest
from cores import Core, pattern
from hypothesis import given
from hypothesis import strategies as st
from pools import run, simulated

from mempool import Pool
from mempool.planning import variants
from mempool.planning.plan_files import read_plans
from mempool.planning.planned_pattern import PlannedPattern, make_plan
from solvers import read_plan, write_plan
from solvers.packing.plan_files import read_plan_columns
from traces import TraceError
from traces.buffers import Buffers
from traces.iterations.pattern import Pattern

MOST = [16_000, 4000, 36_000, 2800, 120_000, 8000, 6000, 24_000, 3200, 48_000]
#: Those of up to 4000 bytes never vary.
LEAST = [size if size <= 4000 else size // 4 for size in MOST]


@pytest.fixture
def core() -> Core:
    made = Core()
    made.client.load(None, pattern(MOST, least=LEAST))
    for _ in range(2):  # it is followed when the first iteration is over
        made.step()
    return made


def scaled(share: float) -> list[int]:
    return [max(least, int(most * share)) for least, most in zip(LEAST, MOST, strict=True)]


@pytest.mark.parametrize("share", [0.25, 0.3, 0.7, 0.99, 1.0])
def test_each_size_within_the_envelope_hits_its_slot(core: Core, share: float) -> None:
    for _ in range(3):
        assert core.run(scaled(share)) == len(MOST)
        core.step()


@given(st.lists(st.tuples(st.floats(0, 1.3), st.booleans()), max_size=30), st.data())
def test_iterations_within_an_envelope_never_overlap(
    iterations: list[tuple[float, bool]], data: st.DataObject
) -> None:
    """`Core` checks the addresses; slots are shared, some buffers are kept, some larger than any slot."""
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


@pytest.mark.parametrize(
    ("position", "size"), [*((at, MOST[at] + 1) for at in (0, 4, 9)), (4, LEAST[4] - 1), (1, MOST[1] - 1)]
)
def test_size_outside_the_envelope_misses(core: Core, position: int, size: int) -> None:
    """Above the slot, below the least size, or another one where the size is constant."""
    assert core.run([*MOST[:position], size, *MOST[position + 1 :]]) == len(MOST) - 1
    assert core.outcomes["size_mismatch"] == 1


@pytest.mark.parametrize("place", range(len(MOST)))
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_extra_allocation_costs_two_misses_at_most(core: Core, place: int, share: float) -> None:
    """It may take a slot of another buffer; positions of constant size realign the cursor."""
    for extra in (600, 999_000):
        sizes = scaled(share)
        assert core.run([*sizes[:place], extra, *sizes[place:]]) >= len(MOST) - 1
        core.step()
    assert core.misses <= 4


def test_buffer_behind_a_smaller_buffer_in_the_same_slot_is_no_obstacle(core: Core) -> None:
    """The buffer lies in a part of the slot that only the largest size needs."""
    hole = core.allocate(999_000)  # so that positions are counted on
    core.free(hole)
    core.step()
    small = core.allocate(LEAST[0])  # 4000 of the 16,000 bytes of its place
    core.client.enter_dynamic()
    place = core.pool.arena_ranges()[0][0] + 4096
    core.client.allocate_next_at(place)
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
    assert core.outcomes["slot_occupied"] == 1
    core.free(behind)


def test_envelope_replaces_the_plans_for_the_sizes_within() -> None:
    core = Core()
    for share in (0.3, 0.6, 1.0):
        core.client.install(pattern(scaled(share)))
    core.client.install(pattern([size + 5 for size in MOST]))
    assert len(core.client.patterns()) == 4
    core.client.install(pattern(MOST, least=LEAST))
    assert len(core.client.patterns()) == 2


def test_invalid_least_sizes_are_refused() -> None:
    for least in ([0] * len(MOST), [size + 1 for size in MOST], LEAST[1:]):
        with pytest.raises(ValueError, match="least size"):
            pattern(MOST, least=least)
    made = pattern(MOST, least=LEAST)
    made.add_table(sequence=1, stream=0, sizes=np.array([600]), offsets=np.array([[0]]))
    with pytest.raises(ValueError, match="each table has least sizes"):
        Core().client.install(made)


# --- with the planner


def batches(
    memory: programs.Watched, length_of: Callable[[int], int], *, each: tuple[int, ...] = (3, 11, 7, 5)
) -> Callable[[int], None]:
    """Run batches with gradients of constant size, which outlive the iteration, and varying activations."""
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
    found = {name: count - before[name] for name, count in pool.client.stats()["outcomes"].items()}
    return {name: count for name, count in found.items() if count and name != "hit"}


def test_iterations_up_to_the_longest_length_seen_hit(pool: Pool) -> None:
    longest = {60: 2000, 90: 2000, 351: 2000}  # iterations with the longest batch
    iteration = batches(programs.Watched(pool), lambda number: longest.get(number, any_length(number)))
    run(pool, iteration, 60, marks=True)
    assert sum(missed(pool, iteration, 60, 1).values()) > 20
    run(pool, iteration, 20, marks=True, first=61)
    assert missed(pool, iteration, 81, 271) == {}


def test_iterations_that_leave_out_allocations_follow_the_envelope(pool: Pool) -> None:
    memory, lengths = programs.Watched(pool), [any_length(number % LEARNED) for number in range(2 * LEARNED)]
    lengths[60] = 2000  # wakes the planner
    batch = batches(memory, lengths.__getitem__)

    def iteration(number: int) -> None:
        batch(number)
        for part in range(5 if lengths[number] > 300 else 0):  # as large batches are sorted
            memory.free(memory.allocate(64 * lengths[number] * (part + 2)))
        memory.free(memory.allocate(999_000))

    run(pool, iteration, LEARNED, marks=True)
    assert missed(pool, iteration, LEARNED, LEARNED) == {}
    assert len(pool.client.patterns()) == 1


def test_arena_of_the_envelope_fits_the_largest_length() -> None:
    def arena(length_of: Callable[[int], int]) -> int:
        with Pool(simulated(), background=False) as pool:
            run(pool, batches(programs.Watched(pool), length_of), LEARNED, marks=True)
            return int(pool.core.stats()["arena_bytes"])

    longest = max(any_length(number) for number in range(LEARNED))
    assert arena(any_length) <= 1.02 * arena(lambda _: longest)


def test_lengths_becoming_few_again_stay_in_the_envelope(pool: Pool) -> None:
    """A plan of their own would give other addresses to buffers that live on."""
    iteration = batches(programs.Watched(pool), lambda n: any_length(n) if n < LEARNED else any_length(n % 2))
    run(pool, iteration, LEARNED, marks=True)
    made = pool.plans
    assert missed(pool, iteration, LEARNED, 100) == {}
    assert pool.plans == made


def test_envelope_beside_another_variant_leaves_at_most_a_buffer_unplanned(pool: Pool) -> None:
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
    # Outputs live for a different number of iterations if the other variant follows.
    assert lost.keys() <= {"dynamic"}
    assert lost.get("dynamic", 0) <= len(later)


def test_longer_lifetimes_within_an_envelope_are_planned_for(pool: Pool) -> None:
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


def test_ever_larger_iterations_are_planned_rarely(pool: Pool) -> None:
    iteration = batches(programs.Watched(pool), lambda number: 200 + 5 * number if number % 2 else 190)
    run(pool, iteration, 300, marks=True)
    assert 4 < pool.plans < 16


def test_variants_following_their_own_plans_get_no_envelope(pool: Pool) -> None:
    iteration = batches(programs.Watched(pool), lambda number: (200, 500, 300)[number * number % 7 % 3])
    run(pool, iteration, LEARNED, marks=True)
    assert missed(pool, iteration, LEARNED, 40) == {}
    assert not pool.planner.learner.registry.has_envelopes()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.plan"
    with Pool(simulated(), background=False) as pool:
        run(pool, batches(programs.Watched(pool), any_length), LEARNED, marks=True)
        pool.save(path)
    return path


@pytest.mark.parametrize("way", ["step", "step at the end", "iteration"])
def test_saved_envelope_serves_other_lengths_from_the_first_iteration(saved: Path, way: str) -> None:
    """The first iteration creates optimizer state, which resembles gradients, and stays."""
    assert any(plan.pattern.least is not None for plan in read_plans(saved).plans)
    with Pool(simulated(), background=False, plan=saved) as pool:
        memory = programs.Watched(pool)
        iteration = batches(memory, lambda number: 150 + 10 * number)
        for number in range(40):
            before = pool.client.stats()["outcomes"]
            with pool.iteration() if way == "iteration" else contextlib.nullcontext():
                if way == "step":
                    pool.step()
                iteration(number)
                if number == 0:
                    hits = pool.client.stats()["outcomes"]["hit"]
                    state = [memory.allocate(4096 + 512 * k) for k in range(24)]
                    assert pool.client.stats()["outcomes"]["hit"] == hits
                if way == "step at the end":
                    pool.step()
            pool.plan_now()
            after = pool.client.stats()["outcomes"]
            misses = sum(after[kind] - before[kind] for kind in after if kind != "hit")
            # The first mark may be the end of the first iteration, or its beginning.
            assert misses == 0 or number < 3
        assert hits > 0
        assert len(state) == 24


@pytest.mark.parametrize(
    ("least", "says"),
    [
        (lambda least: least[:-1], "the least size is not a column of"),
        (lambda least: least * 0, "the least size is out of range"),
        (lambda least: least + 10**9, "a least size is larger than the largest"),
        (lambda least: least * 0.5, "the least size holds something else"),
    ],
)
def test_damaged_least_sizes_in_a_file_are_refused(
    saved: Path, tmp_path: Path, least: Callable[[np.ndarray], object], says: str
) -> None:
    plan, buffers, extra = read_plan(saved)
    columns = read_plan_columns(saved)
    path = tmp_path / "damaged.plan"
    write_plan(plan, buffers, path, extra=extra, extra_columns={**columns, "least": least(columns["least"])})
    with pytest.raises(TraceError, match=says):
        Pool(simulated(), background=False, plan=path)


# --- known and observed patterns


def seen(sizes: Sequence[int], least: Sequence[int] | None = None) -> Pattern:
    """A pattern of buffers, two of which live at a time."""
    n, none = len(sizes), np.zeros(0, np.int64)
    buffers = Buffers.of(np.arange(n), np.arange(n) + 2, sizes, period=n)
    return Pattern(
        *(buffers, np.zeros(n, np.int32), {}, 5, 5, none, none, 0, 1.0, None),
        least=None if least is None else np.array(least, np.int64),
    )


def known(*patterns: Pattern) -> list[PlannedPattern]:
    made = [make_plan(pattern, alignment=64) for pattern in patterns]
    return [planned for planned in made if planned is not None]


def batch(length: int) -> list[int]:
    return [4000, 100 * length, 30 * length, 700]


def test_widened_envelope_covers_every_known_pattern() -> None:
    before = known(seen(batch(90)), seen(batch(10)))
    (wide,) = variants.widen_envelopes([seen(batch(50), [4000, 250, 75, 700])], before)
    assert wide.buffers.size.tolist() == batch(90)
    assert wide.least is not None
    assert wide.least[[0, 3]].tolist() == [4000, 700]  # which never varied
    assert (wide.least <= batch(10)).all()
    assert all(planned.serves(one.pattern) for planned in known(wide) for one in before)
