"""The planner's process: its answers are those of the program, which loses nothing where it is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import programs
import pytest
from asked import dies_elsewhere, never_ends_elsewhere, refuses, surroundings, until, where, works
from pools import run, simulated

from mempool import Pool, planning_process
from mempool.budget import Budget
from mempool.planned import make_plan
from mempool.planning_process import PlanningProcess
from mempool.recording import recurring
from solvers import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlanningProcess]:
    monkeypatch.setattr(planning_process, "START_SECONDS", 60.0)
    made = PlanningProcess(interrupt=lambda: False)
    made.begin()
    yield made
    pid = made.pid
    made.drop()
    assert pid is None or is_gone(pid)


def is_gone(pid: int, seconds: float = 60.0) -> bool:
    """Whether there is no such process, nor what is left of one, after that time at most."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)


def test_patterns_and_plans_are_those_that_are_made_here(pool: Pool, process: PlanningProcess) -> None:
    memory = programs.Watched(pool)
    iteration = programs.training(memory)
    for number in range(12):
        pool.step()
        iteration(number)
    packed, streams, _, whole = pool.client.recording()
    how = {"alignment": 64, "small_bytes": 512, "whole_recording": whole}
    here, there = recurring(packed, streams, **how), process.ask(recurring, packed, streams, **how)
    assert len(here) == len(there) == 1
    for around in ([], [(0, 10_000), (50_000, 51_000)]):
        mine = make_plan(here[0], alignment=64, around=around)
        theirs = process.ask(make_plan, there[0], alignment=64, around=around)
        assert mine is not None
        assert theirs is not None
        assert theirs.key == mine.key
        assert theirs.plan.status == mine.plan.status
        np.testing.assert_array_equal(theirs.plan.offset, mine.plan.offset)
        for name, column in vars(mine.buffers).items():
            np.testing.assert_array_equal(getattr(theirs.buffers, name), column)
    assert process.pid is not None


def test_one_process_answers_until_it_is_dropped(process: PlanningProcess) -> None:
    first = process.ask(where)
    assert first == process.pid == process.ask(where) != os.getpid()
    process.drop_if_idle()
    assert process.pid == first
    process.drop()
    assert is_gone(first)
    assert process.ask(where) not in (first, os.getpid())


def test_one_that_is_idle_is_ended(process: PlanningProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_process, "IDLE_SECONDS", 0.0)
    pid = process.ask(where)
    process.drop_if_idle()
    assert process.pid is None
    assert is_gone(pid)


def test_one_that_dies_is_replaced_by_the_program(process: PlanningProcess) -> None:
    pid = process.pid
    assert pid is not None
    assert process.ask(dies_elsewhere, os.getpid()) == os.getpid()
    assert is_gone(pid)
    assert process.ask(where) == os.getpid()


def test_one_that_has_died_unasked_is_replaced_by_the_program(process: PlanningProcess) -> None:
    os.kill(process.ask(where), signal.SIGKILL)
    assert process.ask(where) == os.getpid()
    assert process.pid is None


def test_an_error_is_that_of_the_call_made_here(process: PlanningProcess) -> None:
    with pytest.raises(PlanError) as caught:
        process.ask(refuses)
    assert any(entry.name == "refuses" for entry in caught.traceback)


def test_what_cannot_be_pickled_is_done_here(process: PlanningProcess) -> None:
    assert process.ask(lambda *, interrupt: (os.getpid(), interrupt())) == (os.getpid(), False)


@pytest.mark.parametrize("program", ["", "/nonexistent/python", "/bin/true", "/bin/cat"])
def test_where_there_is_no_such_process_it_is_done_here(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    process = PlanningProcess(interrupt=lambda: False)
    process.begin(soon=False)
    assert process.ask(where) == os.getpid()
    assert process.pid is None


def test_one_that_starts_slowly_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked meanwhile is done here, and later what is asked there."""
    monkeypatch.setattr(planning_process, "START_SECONDS", 0.0)
    process = PlanningProcess(interrupt=lambda: False)
    process.begin()
    assert process.pid is not None
    assert process.ask(where) == os.getpid()
    until(lambda: process.ask(where) == process.pid)
    process.drop()


def test_a_frozen_program_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its executable is the program, not Python."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    process = PlanningProcess(interrupt=lambda: False)
    process.begin()
    assert process.pid is None
    assert process.ask(where) == os.getpid()


def test_an_interrupt_ends_the_wait_and_the_process() -> None:
    stop = threading.Event()
    process = PlanningProcess(interrupt=stop.is_set)
    said: list[bool] = []

    def ask() -> None:
        process.begin()
        said.append(process.ask(never_ends_elsewhere, os.getpid()))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: process.pid is not None)
    pid = process.pid
    assert pid is not None
    time.sleep(0.2)  # it may be in the middle of it
    stop.set()
    process.end()
    asking.join(10)
    assert said == [True]
    assert is_gone(pid)
    assert process.ask(never_ends_elsewhere, os.getpid())
    assert process.pid is None


def test_its_processor_time_is_counted_without_the_first_start(process: PlanningProcess) -> None:
    process.ask(where)  # which imports what it is in
    first = process.seconds
    process.ask(works, 0.05)
    worked = process.seconds - first
    assert worked >= 0.05
    process.drop()
    process.ask(where)
    assert process.seconds - first - worked > 5 * first  # with another start


def test_it_is_charged_to_the_planners_budget() -> None:
    with Pool(simulated(), background=False) as pool:
        planner = pool._planner
        planner._budget = Budget(allowance=10, share=0, most_debt=10, spent=planner._process.cost)
        with planner._budget.charged():
            planner._process.seconds += 7.0
        assert 2.0 < planner._budget.left() <= 3.0


def test_it_has_nothing_of_the_pools_and_yields_to_the_program(
    process: PlanningProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMPOOL_RECORD", "/nonexistent/trace")
    monkeypatch.setenv("LD_PRELOAD", "")
    environment, modules, group, nice = process.ask(surroundings)
    assert not [name for name in environment if name.startswith(("MEMPOOL", "LD_PRELOAD"))]
    assert not modules & {"mempool.numpy", "mempool.torch", "_mempool_under", "torch", "pyarrow"}
    assert group != os.getpgrp()  # which an interrupt from the keyboard is for
    assert nice == max(planning_process.PRIORITY, os.nice(0)) > 0


def test_a_pool_in_the_background_leaves_the_work_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_process, "START_SECONDS", 60.0)
    with Pool(simulated(), planning_process=True) as pool:
        memory, process = programs.Watched(pool), pool._planner._process

        def iteration() -> None:
            pool.step()
            programs.layers(memory)

        until(lambda: pool.state == "replaying", iteration)
        assert process.seconds > 0
        pid = process.pid
    assert process.pid is None
    assert pid is None or is_gone(pid)


def test_a_pool_whose_process_is_killed_plans() -> None:
    with Pool(simulated(), planning_process=True) as pool:
        memory, process = programs.Watched(pool), pool._planner._process
        until(lambda: process.pid is not None)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)

        def iteration() -> None:
            pool.step()
            programs.layers(memory)

        until(lambda: pool.state == "replaying", iteration)
        assert process.seconds == 0


def test_who_asks_in_another_thread_is_not_kept_waiting(process: PlanningProcess) -> None:
    said: list[int] = []
    other = threading.Thread(target=lambda: said.append(process.ask(where)))
    other.start()
    other.join()
    assert said == [os.getpid()]


def test_it_can_be_done_without() -> None:
    with Pool(simulated()) as pool:
        memory = programs.Watched(pool)
        run(pool, lambda _: programs.layers(memory), 12, marks=True)
        assert pool.plans > 0
        assert pool._planner._process.seconds == 0
        assert pool._planner._process.pid is None


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a script in which ``process`` never comes to an end of what another thread has asked."""
    head = """
        import os, signal, sys, threading, time
        from mempool import Pool
        from asked import never_ends_elsewhere, until, where
        from mempool import planning_process
        planning_process.START_SECONDS = 60.0
        pool = Pool(planning_process=True)
        process = pool._planner._process
        def ask(): process.begin(); process.ask(never_ends_elsewhere, os.getpid())
        until(lambda: process.is_ready)
        print(process.pid, flush=True)
    """
    started: list[subprocess.Popen[str]] = []

    def start(body: str) -> subprocess.Popen[str]:
        file = tmp_path / "script.py"
        file.write_text(textwrap.dedent(head) + textwrap.dedent(body))
        path = os.pathsep.join(p for p in sys.path if p)
        started.append(
            subprocess.Popen(
                [sys.executable, "-W", "error", file],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        )
        return started[-1]

    yield start
    for program in started:
        program.kill()
        program.communicate()


def pid_of(program: subprocess.Popen[str]) -> int:
    assert program.stdout is not None
    return int(program.stdout.readline())


def test_a_program_that_ends_while_it_works_leaves_no_process(
    script: Callable[[str], subprocess.Popen[str]],
) -> None:
    program = script("""
        threading.Thread(target=ask, daemon=True).start()
        time.sleep(0.3)
    """)
    pid = pid_of(program)
    _, errors = program.communicate(timeout=120)
    assert program.returncode == 0, errors
    assert "Traceback" not in errors
    assert is_gone(pid)


def test_nor_does_one_that_is_killed(script: Callable[[str], subprocess.Popen[str]]) -> None:
    program = script("time.sleep(600)")
    pid = pid_of(program)
    program.kill()
    program.wait()
    assert is_gone(pid)


def test_nor_one_that_has_forked(script: Callable[[str], subprocess.Popen[str]]) -> None:
    """The forked child has nothing of it, and would not know how to end it."""
    program = script("""
        if os.fork() == 0:
            assert process.pid is None
            print(os.getpid(), flush=True)
            time.sleep(600)
        time.sleep(600)
    """)
    pid, forked = pid_of(program), pid_of(program)
    try:
        program.kill()
        program.wait()
        assert is_gone(pid)
    finally:
        os.kill(forked, signal.SIGKILL)


def test_a_forked_child_ends_in_peace(script: Callable[[str], subprocess.Popen[str]]) -> None:
    """And the parent goes on with its process."""
    program = script("""
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
            assert process.pid is not None
            process.begin()
            assert process.ask(where) == process.pid
        else:
            pool.close()
    """)
    _, errors = program.communicate(timeout=120)
    assert program.returncode == 0, errors
    assert "ResourceWarning" not in errors
    assert "Traceback" not in errors


def test_a_broken_pipe_does_not_end_a_program_that_would_be_ended_by_one(
    script: Callable[[str], subprocess.Popen[str]],
) -> None:
    program = script("""
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # nobody reads any more
        for _ in range(10):
            pool.step()
            for size in (5000, 6000, 7000, 8000) * 5:
                pool.free(pool.allocate(size))
        assert pool.wait(60)
    """)
    _, errors = program.communicate(timeout=120)
    assert (program.returncode, errors) == (0, "")


def test_an_interrupt_from_the_keyboard_is_the_programs(
    script: Callable[[str], subprocess.Popen[str]],
) -> None:
    program = script("""
        os.setpgid(0, 0)
        try:
            os.killpg(0, signal.SIGINT)
            time.sleep(60)
        except KeyboardInterrupt:
            process.begin()
            assert process.ask(where) == process.pid
    """)
    _, errors = program.communicate(timeout=120)
    assert (program.returncode, errors) == (0, "")
