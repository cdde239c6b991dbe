"""Unused plans: the arena returns memory that only long-unused plans need."""

from __future__ import annotations

import programs
import pytest
from pools import run, simulated

from mempool import Pool

LARGE, SMALL = 1 << 16, 1 << 12  # scales of the program's buffers


def rounds(pool: Pool, count: int, scale: int, memory: programs.Watched, *, marks: bool) -> None:
    """Run iterations for the given seconds of the planner's clock."""
    for _ in range(count):
        run(pool, lambda _: programs.layers(memory, scale=scale), 3, marks=marks)
        pool.client.retire_unused_patterns()


@pytest.mark.parametrize("marks", [True, False])
def test_memory_needed_by_an_unused_plan_only_is_returned(*, marks: bool) -> None:
    with Pool(simulated(), background=False) as pool:
        memory = programs.Watched(pool)
        rounds(pool, 4, LARGE, memory, marks=marks)
        large = pool.report().to_dict()["arena_bytes"]
        assert pool.state == "replaying"
        rounds(pool, 9, SMALL, memory, marks=marks)
        assert pool.report().to_dict()["arena_bytes"] == large  # it may come back
        rounds(pool, 4, SMALL, memory, marks=marks)
        assert pool.report().to_dict()["arena_bytes"] <= large * SMALL / LARGE * 1.1
        assert len(pool.client.patterns()) == 2


@pytest.mark.parametrize("page", [4096, 0])
def test_resumed_plan_has_its_arena_from_the_second_iteration_on(page: int) -> None:
    """An arena that cannot grow in place stays: some buffer may be alive when the plan is resumed."""
    with Pool(simulated(page=page), background=False) as pool:
        memory = programs.Watched(pool)
        rounds(pool, 4, LARGE, memory, marks=True)
        large, plans = pool.report().to_dict()["arena_bytes"], pool.plans
        rounds(pool, 20, SMALL, memory, marks=True)
        assert (pool.report().to_dict()["arena_bytes"] == large) == (page == 0)
        plans += 1
        run(pool, lambda _: programs.layers(memory, scale=LARGE), 2, marks=True)
        missed = pool.report().to_dict()["misses"]
        run(pool, lambda _: programs.layers(memory, scale=LARGE), 10, marks=True)
        assert pool.report().to_dict()["misses"] == missed
        assert pool.report().to_dict()["arena_bytes"] == large
        assert pool.plans == plans


def test_long_iteration_between_two_looks_does_not_make_its_plan_unused() -> None:
    with Pool(simulated(), background=False) as pool:
        memory = programs.Watched(pool)
        rounds(pool, 4, LARGE, memory, marks=True)
        large = pool.report().to_dict()["arena_bytes"]
        for _ in range(30):
            pool.client.retire_unused_patterns()
        assert pool.report().to_dict()["arena_bytes"] == large


def test_plan_of_an_idle_pool_rests_beside_a_busy_pool_until_resumed() -> None:
    with (
        Pool(simulated(), background=False) as idle,
        Pool(share=idle, background=False) as busy,
    ):
        large, small = programs.Watched(idle), programs.Watched(busy)
        rounds(idle, 4, LARGE, large, marks=True)
        before = idle.report().to_dict()
        for _ in range(2):
            for second in range(30):
                run(busy, lambda _: programs.layers(small, scale=SMALL), 3, marks=True)
                for pool in (idle, busy):
                    pool.client.retire_unused_patterns()
                if second == 8:
                    assert idle.report().to_dict()["arena_bytes"] == before["arena_bytes"]
            assert idle.report().to_dict()["arena_bytes"] <= before["arena_bytes"] * SMALL / LARGE * 1.1
            run(idle, lambda _: programs.layers(large, scale=LARGE), 3, marks=True)
            assert idle.report().to_dict()["arena_bytes"] == before["arena_bytes"]
        assert idle.report().to_dict()["misses_total"] == before["misses_total"]


def test_plan_does_not_rest_within_an_iteration() -> None:
    with (
        Pool(simulated(), background=False) as waits,
        Pool(share=waits, background=False) as busy,
    ):
        large, small = programs.Watched(waits), programs.Watched(busy)
        rounds(waits, 4, LARGE, large, marks=True)
        arena = waits.report().to_dict()["arena_bytes"]
        waits.step()
        first = large.allocate(LARGE)
        for _ in range(30):
            run(busy, lambda _: programs.layers(small, scale=SMALL), 3, marks=True)
            waits.client.retire_unused_patterns()
        assert waits.report().to_dict()["arena_bytes"] >= arena
        large.free(first)


def test_plan_followed_now_and_then_does_not_rest() -> None:
    """An evaluation, for example, never at work at a look."""
    with Pool(simulated(), background=False) as pool:
        memory = programs.Watched(pool)
        rounds(pool, 4, LARGE, memory, marks=True)
        large = pool.report().to_dict()["arena_bytes"]
        for _ in range(20):
            run(pool, lambda _: programs.layers(memory, scale=LARGE), 1, marks=True)
            rounds(pool, 1, SMALL, memory, marks=True)
            assert pool.report().to_dict()["arena_bytes"] == large
