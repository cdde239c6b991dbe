"""Extreme inputs: sums of bytes, empty problems, limits and interrupts."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable

import pytest
from instances import flat, padded

from solvers import SOLVERS, Plan, Status, Stop, check, solve
from traces import Buffers

EVERY_SOLVER = pytest.mark.parametrize("solver", list(SOLVERS))
MOST = 2**62
TOO_MUCH = {
    "together": Buffers.of([0, 0, 0], [1, 1, 1], MOST),
    "one after the other": Buffers.of([0, 1, 2], [1, 2, 3], MOST),
    "sums that come round to a few bytes": Buffers.of([0] * 4, [1] * 4, [MOST, MOST, MOST, MOST - 1]),
    "instances": Buffers.of([0], [40], 2**57, period=1),
    "with padding": Buffers.of([0, 0], [1, 1], 1, alignment=MOST),
    "above a fixed offset": Buffers.of([0, 2], [1, 3], [2**61, 1], offset=[-1, MOST]),
}
ALMOST = {
    "one": (Buffers.of([0], [1], MOST - 1), MOST - 1),
    "two": (Buffers.of([0, 0], [1, 1], 2**61 - 1), MOST - 2),
    "one after the other": (Buffers.of([0, 1], [1, 2], 2**61 - 1), 2**61 - 1),
    "with padding": (Buffers.of([0, 0], [1, 1], 1, alignment=2**60), 2**60 + 1),
    "a fixed offset": (Buffers.of([0, 2], [1, 3], [1, 5], offset=[-1, 2**61]), 2**61 + 5),
    "times": (Buffers.of([1 - MOST, 0], [MOST, 1], 1), 2),
    "a period": (Buffers.of([0, MOST - 1], [MOST, MOST], 3, period=MOST), 6),
}
SMALL = {
    "none": (Buffers.of([], [], []), 0),
    "one of few bytes": (Buffers.of([0], [1], 7), 7),
    "one on a circle": (Buffers.of([3], [8], 7, period=5), 7),
    "no lifetimes": (Buffers.of([3, 3], [3, 3], [5, 7]), 0),
    "no bytes": (Buffers.of([3, 4], [9, 9], 0), 0),
    "some without either": (Buffers.of([3, 3, 0], [9, 3, 9], [0, 9, 5]), 5),
    "none that is planned": (Buffers.of([0], [9], 5, persistent=True), 0),
}


@EVERY_SOLVER
@pytest.mark.parametrize("name", TOO_MUCH)
def test_byte_sums_beyond_64_bits_are_refused(solver: str, name: str) -> None:
    with pytest.raises(ValueError, match=r"add up to more than 2\*\*62 bytes"):
        solve(TOO_MUCH[name], solver=solver)


@EVERY_SOLVER
@pytest.mark.parametrize("name", ALMOST | SMALL)
def test_largest_and_smallest_byte_sums_are_planned(solver: str, name: str) -> None:
    buffers, arena = (ALMOST | SMALL)[name]
    plan = solve(buffers, solver=solver, capacity=arena if name in SMALL else None)
    check(plan, buffers)
    assert (plan.arena_bytes, plan.status) == (arena, Status.OPTIMAL)


@EVERY_SOLVER
@pytest.mark.parametrize("capacity", [9, 0, -1])
def test_no_capacity_below_the_largest_buffer_is_enough(solver: str, capacity: int) -> None:
    plan = solve(Buffers.of([0, 5], [3, 9], [10, 4]), solver=solver, capacity=capacity)
    assert (plan.status, plan.offset) == (Status.INFEASIBLE, None)
    assert plan.reason == f"lower bound 10 > capacity {capacity}"


def holds(plan: Plan, buffers: Buffers) -> None:
    """Assert that a stopped plan is valid, or that no plan was found and the plan says so."""
    if plan.offset is None:
        assert plan.status is Status.UNKNOWN
        assert plan.reason == "stopped before there was a plan"
    else:
        check(plan, buffers)


@EVERY_SOLVER
@pytest.mark.parametrize("n", [300, 30_000])
@pytest.mark.parametrize("first", [1, 2, 5])
def test_interrupt_is_not_polled_after_stopping_the_solver(solver: str, first: int, n: int) -> None:
    asked = 0

    def interrupt() -> bool:
        nonlocal asked
        asked += 1
        return asked >= first

    buffers = flat(n, 0)
    plan = solve(buffers, solver=solver, stop=Stop(interrupt=interrupt))
    holds(plan, buffers)
    ended = plan.status is Status.OPTIMAL or (plan.stopped_by == "finished" and asked < first)
    assert ended or plan.stopped_by == "interrupt"
    assert asked <= first + 1


@EVERY_SOLVER
@pytest.mark.parametrize("stop", [Stop(seconds=0), Stop(seconds=0, nodes=10**12), Stop(seconds=1e-9)])
def test_zero_time_ends_after_at_most_a_single_order(solver: str, stop: Stop) -> None:
    buffers = flat(3000, 0)
    plan = solve(buffers, solver=solver, stop=stop)
    holds(plan, buffers)
    assert plan.stopped_by == "time"


@pytest.mark.parametrize("limit", ["seconds", "nodes", "target_bytes"])
def test_invalid_limits_are_refused(limit: str) -> None:
    with pytest.raises(ValueError, match=f"{limit}=-1 is no limit"):
        Stop(**{limit: -1})
    with pytest.raises(ValueError, match="seconds=nan is no limit"):
        Stop(seconds=float("nan"))


def solve_and_press_ctrl_c(after: float, solve_it: Callable[[], Plan]) -> Plan:
    """Solve, and send this process SIGINT after the given seconds.

    Garbage collection is off. Hypothesis hooks into collections, and Python loses exceptions raised in such
    hooks.
    """
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    gc.disable()
    timer.start()
    try:
        return solve_it()
    finally:
        timer.cancel()
        gc.enable()


@pytest.mark.parametrize("solver", ["auto", "greedy"])
def test_ctrl_c_ends_a_search_with_the_best_plan(solver: str) -> None:
    buffers = padded(flat(15_000, 1))
    plan = solve_and_press_ctrl_c(0.3, lambda: solve(buffers, solver=solver, stop=Stop(nodes=2**60)))
    check(plan, buffers)
    assert plan.stopped_by == "interrupt"
