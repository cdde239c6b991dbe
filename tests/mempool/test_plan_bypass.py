"""Plan bypass for an iteration that outgrows its envelope at once.

The iteration gets the memory of the arena.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cores import Core, pattern
from pools import simulated
from sequences import NETWORKS, scaled

from mempool import Pool, _core
from mempool.simulate import simulate

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
def test_outgrown_iteration_gets_the_arena_memory_and_the_next_has_an_arena_again(page: int) -> None:
    core = following(page=page)
    assert core.run(LARGER) == 0
    assert arena(core) == 0
    assert core.committed <= 1.2 * sum(LARGER)
    core.step()
    assert arena(core) > 0
    assert core.run(SIZES) == len(SIZES)


@pytest.mark.parametrize("page", [0, 4096])
@pytest.mark.parametrize("stays", [1, 5, SEVERAL, 12])
def test_arena_memory_is_returned_once_buffers_of_the_last_iteration_are_freed(page: int, stays: int) -> None:
    """Gradients, for example, are freed after the first batch is allocated."""
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
    assert core.committed <= 1.3 * sum(LARGER) + arena(core)
    for address in [*batch, *rest]:
        core.free(address)
    core.step()
    assert core.run(SIZES) == len(SIZES)


@pytest.mark.parametrize("stays", [False, True])
def test_pinned_buffer_in_an_arena_without_pages_ends_the_bypass(stays: bool) -> None:
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


@pytest.mark.parametrize("position", [0, SEVERAL - 1, SEVERAL, SEVERAL + 1, EARLY - 1])
def test_late_outgrowth_is_served_by_the_fallback_beside_the_arena(position: int) -> None:
    """Late: more of the iteration matched the plan than did not."""
    core = following()
    before, last = arena(core), position + SEVERAL
    one_by_one(core, [*SMALLER[:position], *LARGER[position : last - 1]])
    assert arena(core) == before
    one_by_one(core, LARGER[last - 1 : last])
    assert arena(core) == (0 if position <= SEVERAL else before)


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("count", range(1, SEVERAL))
def test_few_extra_buffers_do_not_bypass_the_plan(position: int, count: int) -> None:
    core = following()
    assert core.run([*SMALLER[:position], *[900_001] * count, *SMALLER[position:]]) == len(SIZES)


@pytest.mark.parametrize("times", [1.01, 1.7, 7.9, 8.1, 20])
def test_buffers_many_times_the_planned_size_do_not_bypass_the_plan_in_any_number(times: float) -> None:
    core = following()
    one_by_one(core, [int(times * size) for size in SIZES])
    assert (arena(core) > 0) == (times > 8)


@pytest.mark.parametrize(("limit", "times"), [(1 << 40, 5), (600 * MIB, 16)])
def test_bypass_backs_off_where_memory_beside_the_arena_suffices(limit: int, times: int) -> None:
    core = following(limit=limit)
    assert 300 * MIB < arena(core) < 600 * MIB
    aside = 0
    for _ in range(16):
        one_by_one(core, LARGER[:SEVERAL])
        aside += arena(core) == 0
        core.step()
    assert aside == times


def test_within_a_budget_the_arena_stays() -> None:
    core = following()
    core.pool.set_budget(2 * arena(core))
    before = arena(core)
    one_by_one(core, LARGER)
    assert arena(core) == before


def test_bypass_leaves_the_arena_when_other_clients_share_the_memory() -> None:
    core = following()
    other = _core.Client(core.pool, "other")
    before = arena(core)
    core.run(LARGER)
    assert arena(core) == before
    del other


def longer_and_longer(network: str) -> Trace:
    """A trace of lengths that grow during part of each period, as data arrive in any order."""
    shares = [0.2 + 0.8 * ((7 * number) % 13) / 12 for number in range(5 * 13)]
    return scaled(network, 2048 * MIB, shares, marks=True)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(("allocator", "most"), [("planned_online", 1.3), ("planned_growing", 1.17)])
def test_growing_lengths_never_need_an_arena_and_as_much_memory_beside(
    network: str, allocator: str, most: float
) -> None:
    trace = longer_and_longer(network)
    assert simulate(trace, allocator).peak_reserved_bytes <= most * trace.load().max()


@pytest.mark.parametrize("expected", [True, False])
def test_repetition_before_the_first_mark_is_planned_late_where_marks_are_expected(expected: bool) -> None:
    with Pool(simulated(), background=False) as pool:
        if expected:
            pool.require_step_marks()
        for _ in range(24):
            for size in SIZES:
                pool.client.free(pool.client.allocate(size))
            pool.plan_now()
        assert pool.plans == (0 if expected else 1)
        for _ in range((1 << 16) // len(SIZES) + 16):
            for size in SIZES:
                pool.client.free(pool.client.allocate(size))
        pool.plan_now()
        assert pool.plans == 1
