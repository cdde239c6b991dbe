"""Plans: when the planner makes, keeps, replaces and drops them."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import programs
import pytest
from pools import run, simulated

from mempool import Pool
from mempool.planning.options import OPTIONS
from mempool.recording.events import EventConverter
from traces import EventType, Trace


def test_nested_period_gives_way_to_the_longer_period(pool: Pool) -> None:
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


def test_plan_of_an_epoch_is_not_replaced_by_a_plan_of_its_steps(tmp_path: Path) -> None:
    """Replaying an epoch from the start, the pool sees only steps for a while."""

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
def test_plan_without_hits_is_dropped_with_its_arena(
    tmp_path: Path, loaded: bool, iterations: int, stays: bool
) -> None:
    """A plan from a file stays, and so does a plan to which the program returns."""
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
        # After a recording in vain the pause has four times its length, and a part of the pause is over.
        run(pool, lambda _: programs.layers(memory), 3000, marks=False)
        assert pool.state == "replaying"
        hits = pool.client.stats()["outcomes"]["hit"] - before
        assert hits >= (3000 - 5 if stays else 1000) * 60


def test_buffer_whose_lifetime_grows_is_planned_again(pool: Pool) -> None:
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


def test_looks_beside_known_plans_examine_recent_allocations_only(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("examined_allocations", 64), ("examined_iterations", 4), ("look_bytes", 1 << 30)):
        monkeypatch.setitem(vars(OPTIONS), name, value)
    memory, examined = programs.Watched(pool), []
    converted = EventConverter.convert_brief

    def convert_brief(self: EventConverter, packed: Any, streams: list[int]) -> Trace:
        trace = converted(self, packed, streams)
        examined.append((int((trace.kind == EventType.ALLOC).sum()), len(pool.planner.learner.registry)))
        return trace

    monkeypatch.setattr(EventConverter, "convert_brief", convert_brief)
    for number in range(60):
        programs.layers(memory, count=10 + number // 3, scale=4096 + 512 * (number // 3))
        pool.step()
        pool.plan_now()
    longest = max(len(known.buffers) for known in pool.planner.learner.registry)
    assert {count for count, plans in examined if plans} <= set(range(64, 4 * longest + 1))
    assert max(count for count, plans in examined if plans) > 64


def test_recording_ends_when_all_is_learned_even_if_planning_has_cost_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(OPTIONS), "allowance_seconds", -1.0)
    monkeypatch.setitem(vars(OPTIONS), "time_share", 0.0)
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


def test_planner_and_program_import_numpy_at_the_same_time() -> None:
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


def test_buffer_kept_in_the_arena_is_planned_around(pool: Pool) -> None:
    """Copies for a log are kept for good, made while the arena is idle."""
    memory = programs.Watched(pool)
    iteration = programs.training(memory)
    kept: list[int] = []

    def log(number: int) -> None:
        iteration(number)
        if number in (12, 20):
            kept.extend(memory.allocate(size) for size in (30_000, 70_000) * 6)

    run(pool, log, 32, marks=True)
    before = pool.report().to_dict()
    run(pool, log, 8, marks=True, first=32)
    after = pool.report().to_dict()
    assert after["misses"] == before["misses"]
    assert after["hits"] > before["hits"]
    assert pool.plans > 1
    for address in kept:
        memory.free(address)


def test_pinned_ranges_are_reported_and_are_no_fragmentation(pool: Pool) -> None:
    """An exception keeps a graph alive: no better plan would free that memory."""
    memory = programs.Watched(pool)
    run(pool, lambda _: programs.layers(memory), 12, marks=True)
    plain = pool.report().to_dict()
    assert "planned around" not in str(pool.report())
    kept = [memory.allocate(50_000) for _ in range(10)]
    run(pool, lambda _: programs.layers(memory), 30, marks=True, first=12)
    values = pool.report().to_dict()
    around, arena = values["planned_around_bytes"], values["planned_arena_bytes"]
    assert plain["planned_around_bytes"] == 0 < around < arena
    assert values["fragmentation"] == pytest.approx(1 - (values["peak_load_bytes"] + around) / arena)
    assert "planned around" in str(pool.report())
    assert pool.explain().startswith("no divergences")
    assert "are in use beside the plan" in pool.explain()
    for address in kept:
        memory.free(address)
