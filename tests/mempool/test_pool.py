"""The pool as a whole, on a simulated device: what is planned, what misses, what is held."""

from __future__ import annotations

import atexit
import gc
import itertools
import random
import subprocess
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

import programs
import pytest

from mempool import OutOfMemoryError, Pool, UsageError, _core, planner
from mempool import pool as module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def simulated(capacity: int = 1 << 40, page: int = 4096) -> _core.SimulatedDevice:
    return _core.SimulatedDevice(
        capacity=capacity, page=page, alignment=64, shared_segment=1 << 20, large=256 << 10
    )


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(simulated(), background=False) as made:
        yield made


def run(pool: Pool, iteration: Callable[[int], None], count: int, *, marks: bool, first: int = 0) -> None:
    """So many iterations; the planner looks after each, as its thread would."""
    for number in range(first, first + count):
        if marks:
            pool.step()
        iteration(number)
        pool.plan_now()


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
def test_reserved_memory_is_the_arena_and_what_stays(
    program: Callable[..., Callable[[int], None]],
) -> None:
    with Pool(simulated(), background=False) as pool:
        memory = programs.Watched(pool)
        run(pool, program(memory), 20, marks=True)
        report = pool.report().to_dict()
        ideal = report["lower_bound_bytes"] + report["persistent_bytes"]
        # Shared segments are held by pages: at most one for each buffer that stays, and one for the arena.
        assert report["reserved_bytes"] <= 1.02 * ideal + 4096 * (2 + len(memory.live))


def test_what_an_odd_iteration_took_beside_what_stays_goes_back() -> None:
    """Free pages between small buffers that stay do not stay with them."""
    device = simulated()
    with Pool(device, background=False) as pool:
        memory = programs.Watched(pool)
        run(pool, programs.training(memory), 20, marks=True)
        before = device.counts().committed
        pool.step()
        odd = [memory.allocate(size) for size in (5_000, 100_000, 6_000, 200_000, 7_000)]
        for address in odd[1::2]:
            memory.free(address)
        run(pool, lambda _: programs.layers(memory), 10, marks=True)
        assert device.counts().committed <= before + 4 * 8192


@pytest.mark.parametrize("count", [100, 1000])
def test_a_plan_takes_at_most_256_bytes_of_tables_a_buffer(pool: Pool, count: int) -> None:
    """The guard's and the replay's together, of a plan with an address for each buffer."""
    memory = programs.Watched(pool)
    run(pool, lambda _: programs.layers(memory, count=count), 4, marks=True)
    assert pool.planned is not None
    assert pool.core.stats()["table_bytes"] <= 256 * len(pool.planned.buffers)


def test_what_piles_up_is_served_outside_the_arena(pool: Pool) -> None:
    memory = programs.Watched(pool)
    run(pool, programs.piling(memory), 30, marks=True)
    assert pool.core.stats()["arena_alive"] == 0
    assert pool.report().to_dict()["dynamic"] > 0


def test_a_nested_period_gives_way_to_the_longer_one(pool: Pool) -> None:
    memory = programs.Watched(pool)

    def accumulate(number: int) -> None:
        programs.layers(memory, count=10)
        if number % 4 == 3:
            programs.layers(memory, count=7, scale=4096)

    run(pool, accumulate, 60, marks=False)
    before = pool.report().to_dict()
    run(pool, accumulate, 40, marks=False, first=60)
    after = pool.report().to_dict()
    assert after["misses"] == before["misses"]
    assert after["hits"] - before["hits"] == 40 * 30 + 10 * 21


def test_a_difference_that_comes_back_late_is_planned_too(pool: Pool) -> None:
    """Steps that are clean for so long that recording stopped, and an evaluation after each forty of them."""
    memory = programs.Watched(pool)

    def epoch() -> None:
        for _ in range(40):
            programs.layers(memory)
            pool.plan_now()
        for layer in range(12):
            memory.free(memory.allocate(50_000 + 3_000 * layer))
            pool.plan_now()

    for _ in range(8):
        epoch()
    before = sum(pool.report().to_dict()["misses_by_reason"].values())
    hits = pool.report().to_dict()["hits"]
    epoch()
    assert sum(pool.report().to_dict()["misses_by_reason"].values()) == before
    assert pool.report().to_dict()["hits"] == hits + 40 * 60 + 12


@pytest.mark.parametrize("seed", range(5))
def test_a_longer_period_takes_over_where_its_predecessor_ends(pool: Pool, seed: int) -> None:
    """The plan of the epoch finds nothing alive of an iteration that both plan, at different places."""
    memory = programs.Watched(pool)
    rng = random.Random(seed)
    iteration = [(rng.randrange(1_000, 100_000), min(rng.randrange(1, 15), 40 - k)) for k in range(40)]
    evaluation = [(rng.randrange(50_000, 300_000), min(5, 8 - k)) for k in range(8)]
    alive: dict[int, list[int]] = {}
    clock = itertools.count()

    def allocate(size: int, allocations: int) -> None:
        """A buffer that lives for so many allocations."""
        now = next(clock)
        for address in alive.pop(now, ()):
            memory.free(address)
        alive.setdefault(now + allocations, []).append(memory.allocate(size))

    def epoch() -> None:
        for _ in range(12):
            for position, (size, allocations) in enumerate(iteration):
                allocate(size, allocations)
                if position == 20:
                    pool.plan_now()
        for size, allocations in evaluation:
            allocate(size, allocations)

    while pool.plans < 2:
        epoch()
    epoch()
    report = pool.report().to_dict()
    assert report["planned_buffers"] == 12 * 40 + 8
    assert report["misses"] == 0, pool.explain()


def test_a_plan_of_an_epoch_is_not_replaced_by_one_of_its_steps(tmp_path: Path) -> None:
    """Replaying an epoch from the start, the pool sees only its steps for a while, and keeps to the epoch."""

    def epochs(pool: Pool, count: int) -> None:
        memory = programs.Watched(pool)
        memory.allocate(123_456)
        for _ in range(count):
            for _ in range(12):
                programs.layers(memory)
                pool.plan_now()
            programs.layers(memory, count=3, scale=8192)

    with Pool(simulated(), background=False) as first:
        epochs(first, 8)
        first.save(tmp_path / "plan")
    with Pool(simulated(), background=False, plan=str(tmp_path / "plan")) as second:
        epochs(second, 2)
        report = second.report().to_dict()
        assert report["planned_buffers"] == 12 * 60 + 9
        assert second.plans == 0
        assert report["misses"] <= 1


@pytest.mark.parametrize(
    ("loaded", "iterations", "stays"),
    [(False, 10, False), (True, 10, True), (False, 100, True)],
    ids=["hardly used", "loaded", "long used"],
)
def test_a_plan_that_nothing_follows_is_dropped_with_its_arena(
    tmp_path: Path, loaded: bool, iterations: int, stays: bool
) -> None:
    """A script that repeated something while it was imported, and then never again.

    A file's plan stays, and so does one that the program comes back to, as training does from an evaluation.
    """
    device, plan = simulated(), tmp_path / "it.plan"
    with Pool(device, background=False) as first:
        run(first, lambda _: programs.layers(programs.Watched(first)), 10, marks=False)
        first.save(plan)
    sizes = random.Random(7)
    with Pool(device, background=False, plan=plan if loaded else None) as pool:
        memory = programs.Watched(pool)
        run(pool, lambda _: programs.layers(memory), iterations, marks=False)
        assert pool.state == "replaying"
        arena = pool.core.stats()["arena_bytes"]

        def never_the_same(_: int) -> None:
            for _ in range(1000):
                memory.free(memory.allocate(sizes.randrange(1024, 100_000)))

        run(pool, never_the_same, 60, marks=False)
        assert pool.core.stats()["arena_bytes"] == (arena if stays else 0)
        assert (pool.planned is not None) == stays
        before = pool.client.stats()["outcomes"]["hit"]
        run(pool, lambda _: programs.layers(memory), 2000, marks=False)
        assert pool.state == "replaying"
        hits = pool.client.stats()["outcomes"]["hit"] - before
        assert hits >= (2000 - 5 if stays else 500) * 60


def test_a_saved_plan_hits_from_the_first_iteration(tmp_path: Path) -> None:
    with Pool(simulated(), background=False) as first:
        run(first, programs.training(programs.Watched(first)), 12, marks=True)
        first.save(tmp_path / "plan")
    with Pool(simulated(), background=False, plan=tmp_path / "plan") as second:
        iteration = programs.training(programs.Watched(second))
        run(second, iteration, 1, marks=True)
        early = second.report().to_dict()
        run(second, iteration, 10, marks=True, first=1)
        late = second.report().to_dict()
    assert early["hits"] >= 0.95 * (early["hits"] + early["misses"])
    assert early["hits"] >= 60
    assert late["misses"] == early["misses"]
    assert late["hits"] - early["hits"] == 10 * (60 + 6)


def test_a_saved_plan_without_marks_hits_from_the_first_iteration(tmp_path: Path) -> None:
    with Pool(simulated(), background=False) as first:
        run(first, programs.training(programs.Watched(first)), 12, marks=False)
        first.save(tmp_path / "plan")
    with Pool(simulated(), background=False, plan=tmp_path / "plan") as second:
        iteration = programs.training(programs.Watched(second))
        run(second, iteration, 1, marks=False)
        early = second.report().to_dict()
        run(second, iteration, 10, marks=False, first=1)
        late = second.report().to_dict()
    assert early["hits"] >= 60
    assert late["misses"] == early["misses"]


def test_a_buffer_that_comes_to_live_longer_is_planned_again(pool: Pool) -> None:
    memory = programs.Watched(pool)
    kept: list[int] = []

    def iteration(number: int) -> None:
        extra = memory.allocate(70_000)
        programs.layers(memory)
        if number < 12:
            memory.free(extra)
        else:
            kept.append(extra)
            if len(kept) > 1:
                memory.free(kept.pop(0))

    run(pool, iteration, 40, marks=True)
    before = pool.report().to_dict()["misses"]
    run(pool, iteration, 20, marks=True, first=40)
    assert pool.report().to_dict()["misses"] == before
    assert pool.plans >= 2


def test_a_buffer_freed_by_another_thread_keeps_its_plan(pool: Pool) -> None:
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


@pytest.mark.parametrize("every", [3, 5, 7, 11])
def test_garbage_collected_at_varying_times_never_overlaps_and_mostly_hits(pool: Pool, every: int) -> None:
    memory = programs.Watched(pool)
    cyclic: list[int] = []

    def iteration(number: int) -> None:
        for _ in range(6):
            cyclic.append(memory.allocate(9_000))
            programs.layers(memory, count=3)
            if (number * 6 + len(cyclic)) % every == 0:
                while cyclic:
                    memory.free(cyclic.pop(0))

    run(pool, iteration, 60, marks=True)
    report = pool.report().to_dict()
    if report["state"] == "replaying":
        assert report["hits"] > 5 * report["misses"]


def test_two_workers_in_varying_order_never_overlap(pool: Pool) -> None:
    memory = programs.Watched(pool)
    turn = threading.Lock()

    def work(count: int) -> None:
        for _ in range(3):
            with turn:
                programs.layers(memory, count=count)

    def iteration(number: int) -> None:
        threads = [threading.Thread(target=work, args=(count,)) for count in (8, 12)]
        for thread in threads if number % 2 else reversed(threads):
            thread.start()
        for thread in threads:
            thread.join()
        programs.layers(memory)

    run(pool, iteration, 30, marks=True)
    report = pool.report().to_dict()
    assert report["hits"] > 0


def test_training_fits_a_device_barely_larger_than_it_needs() -> None:
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


def test_an_arena_that_cannot_be_had_costs_hits_and_nothing_else() -> None:
    device = simulated(page=0)
    with Pool(device, background=False) as pool:
        memory = programs.Watched(pool)
        iteration = programs.replaced(memory)
        run(pool, iteration, 6, marks=True)
        pool.release()
        run(pool, iteration, 2, marks=True)
        device.set_capacity(device.counts().committed + (2 << 20))
        run(pool, iteration, 10, marks=True)
        device.set_capacity(1 << 40)
        run(pool, iteration, 10, marks=True)
        assert pool.report().to_dict()["state"] == "replaying"


def test_out_of_memory_tells_the_numbers_and_the_pool_goes_on() -> None:
    with Pool(simulated(), background=False, max_reserved="1MiB") as pool:
        with pytest.raises(OutOfMemoryError, match="2,097,152 bytes asked for") as caught:
            pool.allocate(2 << 20)
        assert isinstance(caught.value, MemoryError)
        assert caught.value.limit_bytes == 1 << 20
        pool.free(pool.allocate(1 << 19))


def test_dynamic_scopes_leave_the_plan_alone(pool: Pool) -> None:
    memory = programs.Watched(pool)
    iteration = programs.replaced(memory)
    run(pool, iteration, 10, marks=True)
    before = pool.report().to_dict()
    for number in range(5):
        run(pool, iteration, 1, marks=True, first=10 + number)
        with pool.dynamic():
            programs.layers(memory, count=9, scale=9000)
    after = pool.report().to_dict()
    assert after["misses"] == before["misses"]
    assert after["outside"] > before["outside"]


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


def test_iterations_by_with_plan_only_what_is_inside(pool: Pool) -> None:
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


def test_everything_given_back_leaves_the_device_empty(pool: Pool) -> None:
    memory = programs.Watched(pool)
    run(pool, programs.training(memory), 12, marks=True)
    assert pool.release() is True
    memory.free_all()
    pool.trim()
    counts = pool.device.counts()
    assert counts.committed == 0
    assert counts.errors == 0


def test_a_call_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPOOL_MAX_RESERVED", "8GiB")
    monkeypatch.setenv("MEMPOOL", "record")
    with Pool(simulated(), background=False) as pool:
        assert pool.settings.max_reserved == 8 << 30
        assert pool.settings.mode == "record"
    with Pool(simulated(), background=False, max_reserved="1e6", mode="off") as pool:
        assert pool.settings.max_reserved == 1_000_000
        assert pool.state == "off"


@pytest.mark.parametrize(
    "options",
    [
        {"small_bytes": -1},
        {"small_bytes": 1025},
        {"small_bytes": True},
        {"small_bytes": 8.0},
        {"small_bytes": "8"},
        {"mode": "fast"},
        {"mode": 1},
        {"mode": ["off"]},
        {"max_reserved": "8 bananas"},
        {"max_reserved": True},
        {"max_reserved": 0},
        {"max_reserved": 0.5},
        {"max_reserved": float("nan")},
        {"max_reserved": 1 << 64},
        {"max_reserved": []},
        {"plan": ""},
        {"plan": 3},
        {"record": ""},
        {"record": True},
        {"check": 1},
        {"explain": "yes"},
        {"background": 0.0},
        {"colour": 1},
    ],
    ids=str,
)
def test_impossible_settings_are_refused_in_one_line(options: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        Pool(simulated(), **{"background": False, **options})
    assert "\n" not in str(caught.value)


def test_settings_are_taken_as_people_write_them() -> None:
    """Modes in any case, sizes as floats, and the most that the core's size classes reach."""
    with Pool(simulated(), background=False, mode="Record", max_reserved=1e9, small_bytes=1024) as pool:
        assert (pool.settings.mode, pool.settings.max_reserved) == ("record", 10**9)
        assert type(pool.settings.max_reserved) is int


def test_a_trace_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The error has the name that was asked for, not that of the file which becomes it."""
    path = str(tmp_path / "nowhere" / "x")
    with pytest.raises(FileNotFoundError) as caught:
        Pool(simulated(), background=False, record=path)
    assert caught.value.filename == path


def test_the_fragmentation_in_a_report_is_that_of_the_numbers_beside_it(pool: Pool) -> None:
    """The arena held is rounded up to pages, which is not the plan's doing; both are shown."""
    run(pool, programs.replaced(programs.Watched(pool)), 10, marks=True)
    report = pool.report()
    values, rows = report.to_dict(), dict(report.rows())
    arena = values["planned_arena_bytes"]
    assert values["fragmentation"] == pytest.approx(1 - values["peak_load_bytes"] / arena)
    assert rows["arena as planned"].startswith(f"{arena:,} B")
    assert rows["arena held now"].startswith(f"{values['arena_bytes']:,} B")


def test_a_closed_pool_says_so_even_while_its_plan_is_in_effect(pool: Pool) -> None:
    run(pool, programs.replaced(programs.Watched(pool)), 10, marks=True)
    assert pool.state == "replaying"
    pool.close()
    assert pool.state == "closed"


def test_pools_leave_nothing_behind_for_the_end_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a pool that was closed nor one that was forgotten keeps a place in a list of things to do."""
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", lambda *function: registered.append(function))
    before = set(module._open)
    closed = Pool(simulated(), background=False)
    assert set(module._open) == before | {closed}
    closed.close()
    forgotten = weakref.ref(Pool(simulated(), background=False))
    gc.collect()
    assert forgotten() is None
    assert set(module._open) == before
    assert not registered


def test_recording_ends_when_all_is_learned_even_if_planning_has_cost_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "ALLOWANCE_SECONDS", -1.0)
    monkeypatch.setattr(planner, "SHARE", 0.0)
    plan = tmp_path / "it.plan"
    with Pool(simulated(), background=False) as first:
        run(first, lambda _: programs.layers(programs.Watched(first)), 10, marks=False)
        first.save(plan)
    with Pool(simulated(), plan=plan) as pool:
        memory = programs.Watched(pool)
        deadline = time.monotonic() + 60
        while pool.client.state()["recording"] and time.monotonic() < deadline:
            programs.layers(memory)
        assert not pool.client.state()["recording"]


@pytest.mark.parametrize("what", ["wake", "work"])
def test_a_waiting_planner_hears_at_once(what: str) -> None:
    """However long it would wait: nobody looks in between whether there is something to do."""
    with Pool(simulated(), background=False) as pool:
        heard: list[bool] = []
        waiting = threading.Thread(target=lambda: heard.append(pool.client.wait_for_work(200.0)))
        waiting.start()
        for _ in range(40 if what == "work" else 0):
            pool.free(pool.allocate(5000))
        if what == "wake":
            pool.client.wake()
        waiting.join(100)
        assert heard == [what == "work"]


def test_a_background_planner_plans_by_itself() -> None:
    with Pool(simulated()) as pool:
        memory = programs.Watched(pool)
        iteration = programs.replaced(memory)
        for number in range(8):
            pool.step()
            iteration(number)
        assert pool.wait(20)
        run_on = 0
        while pool.state != "replaying" and run_on < 10:
            pool.step()
            iteration(run_on)
            run_on += 1
        assert pool.state == "replaying"


def test_a_loop_that_trims_each_time_keeps_its_arena_and_one_that_rests_gives_it_back(pool: Pool) -> None:
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


def test_release_forces_the_arena_out_unless_something_in_it_is_alive(pool: Pool) -> None:
    memory = programs.Watched(pool)
    run(pool, programs.replaced(memory), 10, marks=True)
    assert pool.release() is False
    memory.free_all()
    assert pool.release() is True
    assert pool.device.counts().committed == 0


def test_what_misses_is_explained_with_sizes_and_a_remedy(pool: Pool) -> None:
    memory = programs.Watched(pool)
    run(pool, lambda _: programs.layers(memory), 10, marks=True)
    memory.free(memory.allocate(12_345))
    text = pool.explain()
    assert "got 12,345 B" in text
    assert "exhausted: more allocations than the recorded iteration" in text


def test_news_of_divergences_are_told_once(pool: Pool) -> None:
    from mempool.explain import News

    memory = programs.Watched(pool)
    news = News(pool.client)
    run(pool, lambda _: programs.layers(memory), 10, marks=True)
    assert news() == []
    memory.free(memory.allocate(12_345))
    assert any("12,345" in line for line in news())
    assert news() == []


def test_numpy_is_there_before_the_planner_and_the_program_can_both_import_it() -> None:
    code = (
        "import mempool.numpy\n"
        "with mempool.numpy.install() as pool:\n"
        "    import numpy as np\n"
        "    for _ in range(40):\n"
        "        np.ones(5000).sum()\n"
        "    assert pool.wait(60)\n"
    )
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("program", [programs.replaced, programs.last_three, programs.training])
@pytest.mark.parametrize("mark", ["before", "after"])
def test_a_saved_plan_hits_from_the_second_iteration_on_wherever_the_mark_stands(
    tmp_path: Path, program: Callable[..., Callable[[int], None]], mark: str
) -> None:
    def iterate(pool: Pool, iteration: Callable[[int], None], numbers: range) -> None:
        for number in numbers:
            if mark == "before":
                pool.step()
            iteration(number)
            if mark == "after":
                pool.step()
            pool.plan_now()

    with Pool(simulated(), background=False) as first:
        iterate(first, program(programs.Watched(first)), range(14))
        first.save(tmp_path / "plan")
    with Pool(simulated(), background=False, plan=tmp_path / "plan") as second:
        iteration = program(programs.Watched(second))
        iterate(second, iteration, range(1))
        early = second.report().to_dict()
        iterate(second, iteration, range(1, 12))
        late = second.report().to_dict()
    assert early["hits"] >= 0.95 * (early["hits"] + early["misses"])
    assert late["misses"] == early["misses"]
