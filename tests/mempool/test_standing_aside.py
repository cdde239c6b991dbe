"""An iteration that outgrows its envelope at once goes without the plan, and has the arena's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cores import Core, pattern
from pools import simulated
from sequences import NETWORKS, scaled

from mempool import Pool, _core
from mempool.what_if import replaying, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from traces.trace import Trace

#: An envelope's, where no place is for what is due at another position, nor for one an eighth larger.
SIZES = [576_000 + 44_800 * k for k in range(120)]
LEAST = [size - 6400 for size in SIZES]
LARGER = [size * 9 // 8 for size in SIZES]
SMALLER = [size - 3200 for size in SIZES]
EARLY = 32  # positions in which it has to show
SEVERAL = 6  # buffers by which it does
PATIENCE = 256  # allocations
MIB = 1 << 20


def following(**options: int) -> Core:
    core = Core(**options)
    core.client.install(pattern(SIZES, least=LEAST))
    for _ in range(2):
        core.step()
        core.run(SMALLER)
    core.step()
    assert core.run(SMALLER) == len(SIZES)
    core.step()
    return core


def one_by_one(core: Core, sizes: Sequence[int]) -> int:
    """Each is freed before the next; how many hit."""
    before = core.hits
    for size in sizes:
        core.free(core.allocate(size))
    return core.hits - before


def arena(core: Core) -> int:
    size: int = core.pool.stats()["arena_bytes"]
    return size


@pytest.mark.parametrize("page", [0, 4096])
def test_it_has_the_memory_of_the_arena_which_is_there_again_for_the_next(page: int) -> None:
    core = following(page=page)
    assert core.run(LARGER) == 0
    assert arena(core) == 0
    assert core.committed <= 1.2 * sum(LARGER)
    core.step()
    assert arena(core) > 0
    assert core.run(SIZES) == len(SIZES)


@pytest.mark.parametrize("page", [0, 4096])
@pytest.mark.parametrize("stays", [1, 5, 12])
def test_what_the_last_one_left_there_goes_first(page: int, stays: int) -> None:
    """As gradients do, when the first batch is there."""
    core = following(page=page)
    gradients = [core.allocate(size) for size in SIZES[:stays]]
    core.step()
    before = arena(core)
    batch = [core.allocate(size) for size in LARGER[:SEVERAL]]
    assert arena(core) > 0
    for address in gradients:
        core.free(address)
    rest = [core.allocate(size) for size in LARGER[SEVERAL:]]
    assert arena(core) <= (before / 8 if page else 0)
    for address in [*batch, *rest]:
        core.free(address)
    core.step()
    assert core.run(SIZES) == len(SIZES)


def test_where_there_are_pages_only_what_stays_for_good_keeps_its_own() -> None:
    core = following(page=4096)
    core.allocate(SIZES[0])
    core.step()
    before = arena(core)
    core.run(LARGER)
    assert 0 < arena(core) < before / 8


@pytest.mark.parametrize("stays", [False, True])
def test_what_stays_where_there_are_none_ends_it_and_the_plan_is_followed_again(stays: bool) -> None:
    core = Core(page=0)
    sizes = [*SIZES[:SEVERAL], *(1000 + 8 * k for k in range(2 * PATIENCE)), 10**10]
    core.client.install(pattern(sizes, least=[size - 4 for size in sizes]))
    for _ in range(2):
        core.step()
        one_by_one(core, sizes)
    core.step()
    stranger = core.allocate(sizes[0])
    if not stays:
        core.free(stranger)
    core.step()
    hits = one_by_one(core, [*LARGER[:SEVERAL], *sizes[SEVERAL:]])
    assert (arena(core) > 0) == stays
    assert hits == (len(sizes) - SEVERAL - PATIENCE + 1 if stays else 0)


def test_nor_is_much_taken_beside_it_for_long() -> None:
    """What lives on in it may be of this iteration, such as a batch of a size that never varies."""
    core = following(page=0)
    before = arena(core)
    core.allocate(SIZES[0])
    core.run(LARGER[1 : SEVERAL + 1])
    assert core.run(SMALLER[SEVERAL + 1 : SEVERAL + 3]) == 0
    core.allocate(before // 8)
    assert core.run(SMALLER[SEVERAL + 4 :]) > 50
    assert arena(core) == before


@pytest.mark.parametrize("position", [0, SEVERAL - 1, SEVERAL, SEVERAL + 1, EARLY - 1])
def test_what_shows_too_late_is_served_beside(position: int) -> None:
    """Where more of the iteration was as planned than was not."""
    core = following()
    before, last = arena(core), position + SEVERAL
    one_by_one(core, [*SMALLER[:position], *LARGER[position : last - 1]])
    assert arena(core) == before
    one_by_one(core, LARGER[last - 1 : last])
    assert arena(core) == (0 if position <= SEVERAL else before)


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("count", range(1, SEVERAL))
def test_a_few_buffers_may_be_beside_the_iteration(position: int, count: int) -> None:
    """As tensors that are logged."""
    core = following()
    assert core.run([*SMALLER[:position], *[900_001] * count, *SMALLER[position:]]) == len(SIZES)


@pytest.mark.parametrize("times", [1.01, 1.7, 7.9, 8.1, 20])
def test_what_is_many_times_as_large_is_beside_it_however_much_there_is_of_it(times: float) -> None:
    core = following()
    one_by_one(core, [int(times * size) for size in SIZES])
    assert (arena(core) > 0) == (times > 8)


@pytest.mark.parametrize(("limit", "times"), [(1 << 40, 5), (600 * MIB, 16)])
def test_it_is_done_ever_more_rarely_where_there_is_room_beside_the_arena(limit: int, times: int) -> None:
    core = following(limit=limit)
    assert 300 * MIB < arena(core) < 600 * MIB
    aside = 0
    for _ in range(16):
        one_by_one(core, LARGER[:SEVERAL])
        aside += arena(core) == 0
        core.step()
    assert aside == times


def test_an_arena_that_waits_for_a_calm_moment_is_not_taken_for_a_plan_that_comes_meanwhile() -> None:
    core = Core()
    core.client.install(pattern(SIZES, least=LEAST, calm=9))
    for _ in range(3):
        core.step()
        core.run(SIZES)
    core.step()
    one_by_one(core, LARGER)
    assert arena(core) == 0
    core.step()
    core.client.install(pattern(LARGER, least=LEAST, calm=9))
    assert arena(core) == 0
    assert one_by_one(core, SIZES) == len(SIZES) - 9


@pytest.mark.parametrize("calm", [0, 9])
def test_a_plan_that_comes_meanwhile_takes_none_either(calm: int) -> None:
    core = Core()
    core.client.install(pattern(SIZES, least=LEAST, calm=calm))
    for _ in range(3):
        core.step()
        core.run(SIZES)
    core.step()
    kept = [core.allocate(size) for size in LARGER[:60]]
    assert arena(core) == 0
    core.client.install(pattern(LARGER, least=LEAST, calm=calm))
    kept += [core.allocate(size) for size in LARGER[60:]]
    assert arena(core) == 0
    assert core.committed <= 1.1 * sum(LARGER)
    for address in kept:
        core.free(address)
    core.step()
    core.run(LARGER)
    core.step()
    assert core.run(LARGER) == len(LARGER)


def test_one_that_outgrows_it_again_does_not_take_it_in_a_calm_moment() -> None:
    fixed = [k % 3 == 0 and k >= 12 for k in range(len(SIZES))]  # as an optimizer's temporaries are
    least = [size if is_fixed else size - 6400 for size, is_fixed in zip(SIZES, fixed, strict=True)]
    larger = [size if is_fixed else size * 9 // 8 for size, is_fixed in zip(SIZES, fixed, strict=True)]
    core = Core()
    core.client.install(pattern(SIZES, least=least, calm=90))
    for _ in range(4):
        core.step()
        core.run(SIZES)
    for _ in range(4):
        core.step()
        core.run(larger)
        assert arena(core) == 0
    core.step()
    core.run(SIZES)
    core.step()
    assert core.run(SIZES) == len(SIZES)


@pytest.mark.parametrize("taped", [False, True])
def test_a_size_that_is_the_very_one_has_its_place(taped: bool) -> None:
    """Sizes that halve: each is twice what is due where one was beside the iteration."""
    sizes = [*(16 * MIB >> k for k in range(10)), *SIZES]
    core = Core()
    core.client.install(pattern(sizes))
    for _ in range(3):
        core.step()
        core.run(sizes)
    core.client.set_tape(taped)
    core.step()
    assert core.run([sizes[0], *sizes]) == len(sizes)
    core.client.set_tape(False)


@pytest.mark.parametrize("recording", [False, True])
def test_who_records_sees_the_same(recording: bool) -> None:
    core = following()
    core.client.set_recording(recording)
    core.step()
    wide = [*SMALLER[:3], 900_001, 1_000_001, *SMALLER[3:]]
    assert core.run(wide) == len(SIZES)
    core.step()
    core.run(LARGER)
    assert arena(core) == 0
    core.client.set_recording(False)


def test_within_a_budget_the_arena_stays() -> None:
    core = following()
    core.pool.set_budget(2 * arena(core))
    before = arena(core)
    one_by_one(core, LARGER)
    assert arena(core) == before


def test_a_new_plan_is_given_the_benefit_of_the_doubt() -> None:
    """How rarely it is done is a matter of the plan that is outgrown."""
    core = following()
    for plan in range(3):
        for number in range(8):
            one_by_one(core, LARGER[:SEVERAL])
            assert (arena(core) == 0) == (number in {0, 1, 3, 7})
            core.step()
        core.client.install(pattern([size + plan for size in SIZES], least=LEAST))
        core.step()
        core.run(SIZES)
        core.step()


def test_who_forgets_all_plans_stands_aside_no_more() -> None:
    core = following()
    one_by_one(core, LARGER[: 2 * SEVERAL])
    core.client.drop_patterns()
    before = core.outcomes["unplanned"]
    one_by_one(core, SMALLER)
    assert core.outcomes["unplanned"] == before + len(SMALLER)


def test_other_clients_keep_what_they_have() -> None:
    core = following()
    other = _core.Client(core.pool, "other")
    before = arena(core)
    core.run(LARGER)
    assert arena(core) == before
    del other


def test_who_counts_on_one_size_only_misses_that_once() -> None:
    core = Core()
    core.client.install(pattern(SIZES))
    for _ in range(3):
        core.step()
        core.run(SIZES)
    core.step()
    assert core.run([LARGER[0], *SIZES[1:]]) == len(SIZES) - 1
    assert arena(core) > 0


def test_late_ones_take_the_holes_though_these_are_shut() -> None:
    """They were, since something that stays was in the plan's way."""
    core = following(page=0)
    stranger = core.allocate(SIZES[0])
    for _ in range(4):
        core.step()
        core.run(SMALLER)
    core.step()
    one_by_one(core, SMALLER[:EARLY])
    inside, before = core.arena_alive, core.committed
    kept = [core.allocate(size) for size in LARGER[EARLY:]]
    assert core.arena_alive > inside
    assert core.committed < before + arena(core) / 4
    for address in [*kept, stranger]:
        core.free(address)


# --- programs


def longer_and_longer(network: str) -> Trace:
    """Lengths that grow through some of each period, as they come in any order."""
    shares = [0.2 + 0.8 * ((7 * number) % 13) / 12 for number in range(5 * 13)]
    return scaled(network, 2048 * MIB, shares, marks=True)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(("allocator", "most"), [("planned_online", 1.3), ("planned_growing", 1.15)])
def test_lengths_that_grow_never_need_an_arena_and_as_much_beside_it(
    network: str, allocator: str, most: float
) -> None:
    trace = longer_and_longer(network)
    assert simulate(trace, allocator).peak_reserved_bytes <= most * trace.load().max()


@pytest.mark.parametrize("network", NETWORKS)
def test_where_there_is_hardly_more_memory_than_the_longest_needs_all_of_it_fits(network: str) -> None:
    trace = longer_and_longer(network)
    limit = int(1.1 * trace.load().max())
    device = _core.ReplayDevice(limit, growing=True)
    with replaying(trace, device, limit) as (pool, replay):
        while replay.go(400):
            pool.plan_now()
        assert pool.client.stats()["out_of_memory"] == 0


# --- before the first mark


@pytest.mark.parametrize("expected", [True, False])
def test_what_repeats_before_the_first_mark_gets_no_plan_where_marks_are_expected(expected: bool) -> None:
    with Pool(simulated(), background=False) as pool:
        if expected:
            pool.expect_marks()
        for _ in range(24):
            for size in SIZES:
                pool.client.free(pool.client.allocate(size))
            pool.plan_now()
        assert pool.plans == (0 if expected else 1)
        for _ in range(4):
            pool.step()
            for size in SIZES:
                pool.client.free(pool.client.allocate(size))
            pool.plan_now()
        assert pool.plans > 0


def test_where_none_comes_it_gets_one_in_the_end() -> None:
    with Pool(simulated(), background=False) as pool:
        pool.expect_marks()
        for number in range((1 << 16) // len(SIZES) + 40):
            for size in SIZES:
                pool.client.free(pool.client.allocate(size))
            if number % 32 == 0:
                pool.plan_now()
        assert pool.plans == 1
