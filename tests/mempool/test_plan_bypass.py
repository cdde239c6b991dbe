"""Arenas that are refused, outgrown in the first iteration, or unused for long."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import programs
import pytest
from cores import Core, pattern
from fake_cuda import FakeCuda
from pools import run, simulated
from sequences import NETWORKS, scaled

from mempool import Pool, _core
from mempool.simulate import simulate
from traces.trace import Trace

#: Sizes of an envelope of which no slot fits the size of another position, nor a size an eighth larger.
SIZES = [576_000 + 44_800 * k for k in range(120)]
LEAST = [size - 6400 for size in SIZES]
LARGER = [size * 9 // 8 for size in SIZES]
SMALLER = [size - 3200 for size in SIZES]
EARLY = 32  # positions within which the follower must notice the difference
SEVERAL = 6  # differing buffers after which the follower notices
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
    """Allocate sizes, and free each buffer before the next allocation; return the hits."""
    before = core.hits
    for size in sizes:
        core.free(core.allocate(size))
    return core.hits - before


def arena_bytes(core: Core) -> int:
    size: int = core.pool.stats()["arena_bytes"]
    return size


@pytest.mark.parametrize("page", [0, 4096])
def test_outgrown_iteration_gets_the_arena_memory_and_the_next_has_an_arena_again(page: int) -> None:
    core = following(page=page)
    assert core.run(LARGER) == 0
    assert arena_bytes(core) == 0
    assert core.committed <= 1.2 * sum(LARGER)
    core.step()
    assert arena_bytes(core) > 0
    assert core.run(SIZES) == len(SIZES)


@pytest.mark.parametrize("page", [0, 4096])
@pytest.mark.parametrize("stays", [1, 5, SEVERAL, 12])
def test_arena_memory_is_returned_once_buffers_of_the_last_iteration_are_freed(page: int, stays: int) -> None:
    """An example: gradients are freed after the first batch is allocated."""
    core = following(page=page)
    gradients = [core.allocate(size) for size in SIZES[:stays]]
    core.step()
    before = arena_bytes(core)
    batch = [core.allocate(size) for size in LARGER[:SEVERAL]]
    assert arena_bytes(core) > 0
    for address in gradients:
        core.free(address)
    rest = [core.allocate(size) for size in LARGER[SEVERAL:]]
    assert arena_bytes(core) <= (before / 8 if page else 0)
    assert core.committed <= 1.3 * sum(LARGER) + arena_bytes(core)
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
    assert (arena_bytes(core) > 0) == stays
    assert hits == (len(sizes) - SEVERAL - PATIENCE + 1 if stays else 0)


@pytest.mark.parametrize("position", [0, SEVERAL - 1, SEVERAL, SEVERAL + 1, EARLY - 1])
def test_late_outgrowth_is_served_by_the_fallback_beside_the_arena(position: int) -> None:
    """The difference comes late: most of the iteration matched the plan."""
    core = following()
    before, last = arena_bytes(core), position + SEVERAL
    one_by_one(core, [*SMALLER[:position], *LARGER[position : last - 1]])
    assert arena_bytes(core) == before
    one_by_one(core, LARGER[last - 1 : last])
    assert arena_bytes(core) == (0 if position <= SEVERAL else before)


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("count", range(1, SEVERAL))
def test_few_extra_buffers_do_not_bypass_the_plan(position: int, count: int) -> None:
    core = following()
    assert core.run([*SMALLER[:position], *[900_001] * count, *SMALLER[position:]]) == len(SIZES)


@pytest.mark.parametrize("times", [1.01, 1.7, 7.9, 8.1, 20])
def test_buffers_many_times_the_planned_size_do_not_bypass_the_plan_in_any_number(times: float) -> None:
    core = following()
    one_by_one(core, [int(times * size) for size in SIZES])
    assert (arena_bytes(core) > 0) == (times > 8)


def test_within_a_budget_the_arena_stays() -> None:
    core = following()
    core.pool.set_budget(2 * arena_bytes(core))
    before = arena_bytes(core)
    one_by_one(core, LARGER)
    assert arena_bytes(core) == before


def test_bypass_leaves_the_arena_when_other_clients_share_the_memory() -> None:
    core = following()
    other = _core.Client(core.pool, "other")
    before = arena_bytes(core)
    core.run(LARGER)
    assert arena_bytes(core) == before
    del other


def longer_and_longer(network: str) -> Trace:
    """Return a trace of lengths that grow during a part of each period."""
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


LARGE, SMALL = [40 * MIB] * 6, [12 * MIB] * 3
MEMORY_CALLS = ("cuMemAlloc_v2", "cuMemFree_v2", "cuMemCreate", "cuMemUnmap", "cuCtxSynchronize")


def iterations(pool: Pool, sizes: list[int], count: int) -> None:
    for _ in range(count):
        pool.step()
        for address in [pool.allocate(size) for size in sizes]:
            pool.free(address)


def learn(pool: Pool, sizes: list[int]) -> None:
    for _ in range(8):
        iterations(pool, sizes, 1)
        pool.plan_now()
    assert pool.state == "replaying"


def calls(fake: FakeCuda) -> list[int]:
    return [fake.calls(name) for name in MEMORY_CALLS]


def hits(pool: Pool) -> int:
    return int(pool.report().to_dict()["hits_total"])


@pytest.mark.parametrize("memory", ["plain", "growing"])
def test_arena_larger_than_free_memory_is_not_tried(fake: FakeCuda, memory: str) -> None:
    with Pool(fake.device(memory=memory), background=False) as pool:
        learn(pool, LARGE)
        pool.release()
        fake.set_capacity(200 * MIB)
        iterations(pool, LARGE[:4], 20)
        before, looks = calls(fake), fake.calls("cuMemGetInfo_v2")
        iterations(pool, LARGE[:4], 1000)
        assert calls(fake) == before
        assert fake.calls("cuMemGetInfo_v2") - looks <= 1000 // 64 + 1
        fake.set_capacity(1000 * MIB)
        iterations(pool, LARGE, 66)
        before_hits = hits(pool)
        iterations(pool, LARGE, 10)
        assert hits(pool) == before_hits + 60


@contextlib.contextmanager
def refused_by_the_device() -> Iterator[tuple[Pool, _core.SimulatedDevice, Callable[[], None]]]:
    """Yield a pool whose arena the device refuses, the device, and a function that makes room."""
    device = simulated(300 * MIB, page=0)
    with Pool(device, background=False) as pool:
        pool.client.load(None, pattern(LARGE))
        kept = pool.allocate(60 * MIB)
        pool.release()
        hog = pool.allocate(61 * MIB)

        def make_room() -> None:
            pool.free(hog)
            pool.free(kept)

        yield pool, device, make_room


def test_arena_of_unknown_availability_is_tried_ever_more_rarely() -> None:
    with refused_by_the_device() as (pool, device, make_room):
        iterations(pool, [4096], 1000)
        assert 5 <= device.counts().refusals <= 10
        make_room()
        iterations(pool, LARGE, 1100)
        assert pool.state == "replaying"


@pytest.mark.parametrize("memory", ["plain", "growing"])
def test_too_large_plan_takes_nothing_from_another_client(fake: FakeCuda, memory: str) -> None:
    with (
        Pool(fake.device(memory=memory), background=False) as one,
        Pool(share=one, background=False) as other,
    ):
        for _ in range(8):
            for pool, sizes in ((one, SMALL), (other, LARGE)):
                iterations(pool, sizes, 1)
                pool.plan_now()
        assert (one.state, other.state) == ("replaying", "replaying")
        other.release()
        fake.set_capacity(200 * MIB)
        for _ in range(5):
            iterations(one, SMALL, 1)
            iterations(other, LARGE[:4], 1)
        before, before_hits = calls(fake), hits(one)
        for _ in range(400):
            iterations(one, SMALL, 1)
            iterations(other, LARGE[:4], 1)
        assert calls(fake) == before
        assert hits(one) == before_hits + 1200
        fake.set_capacity(1000 * MIB)
        for _ in range(66):
            iterations(one, SMALL, 1)
            iterations(other, LARGE, 1)
        assert (one.state, other.state) == ("replaying", "replaying")


def test_shortage_of_memory_is_reported_once(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    with Pool(fake.device(), background=False) as pool, caplog.at_level(logging.WARNING, "mempool"):
        learn(pool, LARGE)
        pool.release()
        fake.set_capacity(200 * MIB)
        iterations(pool, LARGE[:4], 1)
        assert "no memory for its arena: there is too little memory" in pool.explain()
        for _ in range(3):
            iterations(pool, LARGE[:4], 10)
            pool.planner.run_once(0.0)
        told = [line for line in caplog.messages if "cannot be had" in line]
        assert len(told) == 1
        assert "an arena of 240 MiB cannot be had" in told[0]
        assert "which has 40 MiB free of 200 MiB" in told[0]
        assert "raise max_reserved" in told[0]


LARGE_SCALE, SMALL_SCALE = 1 << 16, 1 << 12  # scales of the program's buffers


def rounds(pool: Pool, count: int, scale: int, memory: programs.Watched, *, marks: bool) -> None:
    """Run iterations for the given seconds of the planner's clock."""
    for _ in range(count):
        run(pool, lambda _: programs.layers(memory, scale=scale), 3, marks=marks)
        pool.client.retire_unused_patterns()


@pytest.mark.parametrize("marks", [True, False])
def test_memory_needed_by_an_unused_plan_only_is_returned(*, marks: bool) -> None:
    with Pool(simulated(), background=False) as pool:
        memory = programs.Watched(pool)
        rounds(pool, 4, LARGE_SCALE, memory, marks=marks)
        large = pool.report().to_dict()["arena_bytes"]
        assert pool.state == "replaying"
        rounds(pool, 9, SMALL_SCALE, memory, marks=marks)
        assert pool.report().to_dict()["arena_bytes"] == large  # the iteration may return
        rounds(pool, 4, SMALL_SCALE, memory, marks=marks)
        assert pool.report().to_dict()["arena_bytes"] <= large * SMALL_SCALE / LARGE_SCALE * 1.1
        assert len(pool.client.patterns()) == 2


@pytest.mark.parametrize("page", [4096, 0])
def test_resumed_plan_has_its_arena_from_the_second_iteration_on(page: int) -> None:
    """An arena that cannot grow in place stays: some buffer may be alive when the plan is resumed."""
    with Pool(simulated(page=page), background=False) as pool:
        memory = programs.Watched(pool)
        rounds(pool, 4, LARGE_SCALE, memory, marks=True)
        large, plans = pool.report().to_dict()["arena_bytes"], pool.plans
        rounds(pool, 20, SMALL_SCALE, memory, marks=True)
        assert (pool.report().to_dict()["arena_bytes"] == large) == (page == 0)
        plans += 1
        run(pool, lambda _: programs.layers(memory, scale=LARGE_SCALE), 2, marks=True)
        missed = pool.report().to_dict()["misses"]
        run(pool, lambda _: programs.layers(memory, scale=LARGE_SCALE), 10, marks=True)
        assert pool.report().to_dict()["misses"] == missed
        assert pool.report().to_dict()["arena_bytes"] == large
        assert pool.plans == plans


def test_plan_of_an_idle_pool_rests_beside_a_busy_pool_until_resumed() -> None:
    with (
        Pool(simulated(), background=False) as idle,
        Pool(share=idle, background=False) as busy,
    ):
        large, small = programs.Watched(idle), programs.Watched(busy)
        rounds(idle, 4, LARGE_SCALE, large, marks=True)
        before = idle.report().to_dict()
        for _ in range(2):
            for second in range(30):
                run(busy, lambda _: programs.layers(small, scale=SMALL_SCALE), 3, marks=True)
                for pool in (idle, busy):
                    pool.client.retire_unused_patterns()
                if second == 8:
                    assert idle.report().to_dict()["arena_bytes"] == before["arena_bytes"]
            assert (
                idle.report().to_dict()["arena_bytes"]
                <= before["arena_bytes"] * SMALL_SCALE / LARGE_SCALE * 1.1
            )
            run(idle, lambda _: programs.layers(large, scale=LARGE_SCALE), 3, marks=True)
            assert idle.report().to_dict()["arena_bytes"] == before["arena_bytes"]
        assert idle.report().to_dict()["misses_total"] == before["misses_total"]


def test_plan_does_not_rest_within_an_iteration() -> None:
    with (
        Pool(simulated(), background=False) as waits,
        Pool(share=waits, background=False) as busy,
    ):
        large, small = programs.Watched(waits), programs.Watched(busy)
        rounds(waits, 4, LARGE_SCALE, large, marks=True)
        arena = waits.report().to_dict()["arena_bytes"]
        waits.step()
        first = large.allocate(LARGE_SCALE)
        for _ in range(30):
            run(busy, lambda _: programs.layers(small, scale=SMALL_SCALE), 3, marks=True)
            waits.client.retire_unused_patterns()
        assert waits.report().to_dict()["arena_bytes"] >= arena
        large.free(first)
