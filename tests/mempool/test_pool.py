"""The pool as a whole, on a simulated device: plans, misses and reserved memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

import programs
import pytest
from pools import run, simulated

from mempool import OutOfMemoryError, Pool, UsageError

PROGRAMS = [programs.replaced, programs.last_three, programs.prefetched, programs.piling, programs.training]


@pytest.mark.parametrize("marks", [True, False], ids=["marks", "detected"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_every_planned_allocation_hits_once_the_plan_is_in_effect(
    pool: Pool, program: Callable[..., Callable[[int], None]], marks: bool
) -> None:
    memory = programs.Watched(pool)
    run(pool, program(memory), 20, marks=marks)
    report = pool.report().to_dict()
    assert report["state"] == "replaying"
    assert report["plan_active_at_iteration"] <= 8
    assert report["misses"] == 0
    assert report["hits"] >= 8 * 60
    assert report["coverage"] >= 0.99


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_reserved_memory_is_the_arena_and_persistent_buffers(
    program: Callable[..., Callable[[int], None]],
) -> None:
    with Pool(simulated(), background=False) as pool:
        memory = programs.Watched(pool)
        run(pool, program(memory), 20, marks=True)
        report = pool.report().to_dict()
        ideal = report["lower_bound_bytes"] + report["persistent_bytes"]
        # Shared segments are held by pages: at most one for each buffer that stays, and one for the arena.
        assert report["reserved_bytes"] <= 1.02 * ideal + 4096 * (2 + len(memory.live))


@pytest.mark.parametrize("count", [100, 1000])
def test_plan_takes_at_most_256_bytes_of_tables_a_buffer(pool: Pool, count: int) -> None:
    memory = programs.Watched(pool)
    run(pool, lambda _: programs.layers(memory, count=count), 4, marks=True)
    assert pool.planned is not None
    assert pool.core.stats()["table_bytes"] <= 256 * len(pool.planned.buffers)


def test_accumulating_buffers_are_served_outside_the_arena(pool: Pool) -> None:
    memory = programs.Watched(pool)
    run(pool, programs.piling(memory), 30, marks=True)
    assert pool.core.stats()["arena_live_ranges"] == 0
    assert pool.report().to_dict()["dynamic"] > 0


def test_buffer_freed_by_another_thread_keeps_its_plan(pool: Pool) -> None:
    memory = programs.Watched(pool)
    pending: list[int] = []

    def iteration(_: int) -> None:
        mine = memory.allocate(64_000)
        programs.layers(memory)
        pending.append(mine)
        thread = threading.Thread(target=lambda: memory.free(pending.pop()))
        thread.start()
        thread.join()

    run(pool, iteration, 20, marks=True)
    assert pool.report().to_dict()["misses"] == 0


def test_training_fits_a_device_barely_larger_than_its_need() -> None:
    with Pool(simulated(page=0), background=False) as roomy:
        memory = programs.Watched(roomy)
        run(roomy, big_training(memory), 12, marks=True)
        report = roomy.report().to_dict()
        need = report["peak_load_bytes"] + report["persistent_bytes"]
    with Pool(simulated(capacity=int(1.05 * need), page=0), background=False) as tight:
        memory = programs.Watched(tight)
        run(tight, big_training(memory), 20, marks=True)
        report = tight.report().to_dict()
        assert report["state"] == "replaying"
        assert report["misses"] == 0
        assert tight.device.counts().peak_committed <= 1.05 * need


def big_training(memory: programs.Watched) -> Callable[[int], None]:
    parameters = [memory.allocate(size << 20) for size in (4, 8, 2)]

    def iteration(number: int) -> None:
        programs.layers(memory, count=12, scale=3 << 20)
        if number == 0:
            parameters.extend(memory.allocate(size << 20) for size in (4, 8, 2))

    return iteration


def test_out_of_memory_error_has_the_numbers_and_the_pool_goes_on() -> None:
    with Pool(simulated(), background=False, max_reserved="1MiB") as pool:
        with pytest.raises(OutOfMemoryError, match="2,097,152 bytes asked for") as caught:
            pool.allocate(2 << 20)
        assert isinstance(caught.value, MemoryError)
        assert caught.value.limit_bytes == 1 << 20
        pool.free(pool.allocate(1 << 19))


def test_nested_and_mixed_marks_are_refused(pool: Pool) -> None:
    with pool.iteration():
        with pytest.raises(UsageError, match="inside"), pool.iteration():
            pass
        with pytest.raises(UsageError, match="step"):
            pool.step()
        caught: list[Exception] = []

        def other() -> None:
            try:
                with pool.iteration():
                    pass
            except UsageError as error:
                caught.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert "another thread" in str(caught[0])
    with pool.iteration():
        pass


def test_iterations_by_with_plan_their_own_buffers_only(pool: Pool) -> None:
    memory = programs.Watched(pool)
    body = programs.replaced(memory)
    for number in range(12):
        memory.free(memory.allocate(5000 + 700 * number))
        with pool.iteration():
            body(number)
        pool.plan_now()
    report = pool.report().to_dict()
    assert report["state"] == "replaying"
    assert report["misses"] == 0


def test_arena_survives_a_trim_in_each_iteration_but_not_while_idle(pool: Pool) -> None:
    memory = programs.Watched(pool)
    iteration = programs.layers
    for _ in range(10):
        pool.step()
        iteration(memory)
        pool.plan_now()
        pool.trim()
    assert pool.report().to_dict()["arena_bytes"] > 0
    assert pool.report().to_dict()["misses"] == 0
    pool.trim()
    assert pool.report().to_dict()["arena_bytes"] == 0
    run(pool, lambda _: iteration(memory), 2, marks=True)
    report = pool.report().to_dict()
    assert report["state"] == "replaying"
    assert report["misses"] == 0
