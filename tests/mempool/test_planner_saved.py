"""Plans from files: programs they serve, and refused files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import programs
import pytest
from pools import run, simulated

from mempool import Pool, UsageError, _core
from solvers import Plan, PlanError, Status, write_plan
from traces import Buffers


def trained(path: Path, *, marks: bool = True) -> Path:
    """Save the plan of a training; return the path."""
    with Pool(simulated(), background=False) as pool:
        run(pool, programs.training(programs.Watched(pool)), 12, marks=marks)
        pool.save(path)
    return path


def test_ended_thread_does_not_prolong_the_warm_up(tmp_path: Path) -> None:
    """The thread loaded data in the beginning; later allocations outside the plan may use arena holes."""

    def program(pool: Pool) -> programs.Watched:
        memory = programs.Watched(pool)
        memory.allocate(8000)
        loader = threading.Thread(target=memory.allocate, args=(9000,))
        loader.start()
        loader.join()
        while Path(f"/proc/self/task/{loader.native_id}").exists():  # the pool notices the end of the thread
            time.sleep(0.001)
        run(pool, lambda _: programs.layers(memory), 20, marks=False)
        return memory

    with Pool(simulated(), background=False) as first:
        program(first)
        first.save(tmp_path / "plan")
    with Pool(simulated(), background=False, plan=tmp_path / "plan") as second:
        memory = program(second)
        assert second.plans == 0
        reserved = second.core.stats()["reserved"]["current"]
        for size in range(7000, 7000 + 200 * 64, 64):
            memory.free(memory.allocate(size))
        memory.allocate(30_000)
        assert second.core.stats()["reserved"]["current"] <= reserved + 4096
        memory.free_all()


def test_repetition_before_the_first_iteration_is_not_planned_again(tmp_path: Path) -> None:
    """A saved plan knows the program's beginning: the planner's first look may fall within."""

    def program(pool: Pool, *, early: bool) -> None:
        memory = programs.Watched(pool)
        memory.allocate(5000)
        for _ in range(30):
            memory.free(memory.allocate(8000))
        if early:
            pool.plan_now()
        run(pool, lambda _: programs.layers(memory), 20, marks=False)
        memory.free_all()

    with Pool(simulated(), background=False) as first:
        program(first, early=False)
        first.save(tmp_path / "plan")
    with Pool(simulated(), background=False, plan=tmp_path / "plan") as second:
        program(second, early=True)
        assert second.report().to_dict()["misses"] == 0
        assert second.plans == 0


@pytest.mark.parametrize("first_phase", [0, 60])
def test_all_saved_plans_replay_where_iterations_are_not_marked(tmp_path: Path, first_phase: int) -> None:

    def phases(pool: Pool, memory: programs.Watched, begin: int = 0) -> int:
        before = pool.report().to_dict()["misses"]
        for number in range(begin, begin + 240):
            scale = 1000 if number // 60 % 2 == 0 else 1600
            programs.layers(memory, 20, scale=scale)
            pool.plan_now()
        return int(pool.report().to_dict()["misses"] - before)

    with Pool(simulated(), background=False) as first:
        phases(first, programs.Watched(first))
        assert len(first.planner.learner.registry) == 2
        first.save(tmp_path / "plan")
    with Pool(simulated(), background=False, plan=tmp_path / "plan") as second:
        assert phases(second, programs.Watched(second), first_phase) <= 20
        assert second.plans == 0


def test_plan_file_of_nothing_is_refused_by_name(tmp_path: Path) -> None:
    plan = Plan(np.zeros((0, 1), np.int64), 0, 0, Status.FEASIBLE, "hand", 0, 0.0, "", period=4)
    path = tmp_path / "wrong.plan"
    columns = {"sequence": np.zeros(0, np.int32)}
    write_plan(plan, Buffers.of([], [], [], period=4), path, extra_columns=columns)
    with pytest.raises(PlanError, match=r"wrong.plan: .*a plan of nothing"):
        Pool(simulated(), background=False, plan=path)


@pytest.mark.parametrize("program", [programs.replaced, programs.last_three, programs.training])
@pytest.mark.parametrize("mark", ["before", "after"])
def test_saved_plan_hits_from_the_second_iteration_on_wherever_the_mark_stands(
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


@pytest.mark.parametrize("same", [True, False])
def test_plan_of_another_program_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, same: bool
) -> None:
    with Pool(simulated(), background=False, plan=trained(tmp_path / "plan")) as pool:
        memory = programs.Watched(pool)

        def another(_: int) -> None:
            for address in [memory.allocate(7000 + 97 * k) for k in range(40)]:
                memory.free(address)

        run(pool, programs.training(memory) if same else another, 20, marks=True)
        assert [record.message for record in caplog.records if "follows the plan" in record.message] == (
            [] if same else ["hardly anything follows the plan so far: is it another program's or model's?"]
        )
        assert pool.client.stats()["outcomes"]["hit"] > 0


def test_plan_of_another_device_is_refused_by_name(tmp_path: Path) -> None:
    """The saved offsets are multiples of the other device's alignment."""
    plan = trained(tmp_path / "plan")
    with pytest.raises(UsageError, match=r"plan: .*another device"):
        Pool(_core.SimulatedDevice(alignment=512), background=False, plan=plan)
