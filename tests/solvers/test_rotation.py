"""Rotation of column counts: several counts share one limit, and a combined claim holds for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problem_classes import GENERATORS

from solvers import Plan, Status, Stop, check, solve
from solvers.packing.progress import ProgressTotal
from solvers.packing.rotation import Attempts, columns_to_try
from traces.buffers import Buffers

if TYPE_CHECKING:
    from collections.abc import Callable

    from solvers.packing.task import Task


def plan(
    arena: int, bound: int, nodes: int = 0, stopped_by: str = "bound", status: Status | None = None
) -> Plan:
    status = status or (Status.OPTIMAL if arena <= bound else Status.FEASIBLE)
    offset = None if status in (Status.UNKNOWN, Status.INFEASIBLE) else np.zeros((1, 1), np.int64)
    return Plan(offset, arena, bound, status, "auto", 0, 0.0, stopped_by, nodes=nodes)


def run(
    attempts: Attempts, total: ProgressTotal, work: Callable[[int, Stop], Plan]
) -> list[tuple[int, Stop]]:
    seen = []
    for columns, part in attempts:
        seen.append((columns, part))
        made = work(columns, part)
        total.add(made)
        attempts.add(columns, made)
    return seen


def rotating() -> Buffers:
    start = np.arange(3)
    return Buffers.of(start, start + 4, np.array([100, 130, 170]), period=3, alignment=np.full(3, 64))


needs = st.lists(st.integers(0, 3000), min_size=1, max_size=4)


@given(needs=needs, budget=st.integers(0, 5000), rounds=st.booleans())
def test_attempts_together_stay_within_the_budget(needs: list[int], budget: int, rounds: bool) -> None:
    total = ProgressTotal()
    attempts = Attempts(range(len(needs)), Stop(nodes=budget), total, rounds=rounds)

    def work(columns: int, part: Stop) -> Plan:
        assert part.nodes is not None
        left = part.nodes < needs[columns]
        return plan(9, 5, min(needs[columns], part.nodes), "nodes" if left else "proof")

    seen = run(attempts, total, work)
    assert total.nodes <= budget
    assert {columns for columns, _ in seen} == set(range(len(needs)))
    assert len(seen) <= (2 if rounds else 1) * len(needs)


@pytest.mark.parametrize("slow", range(4))
def test_quick_attempts_leave_their_share_to_a_slow_attempt(slow: int) -> None:
    """Wherever the slow attempt is in the row, less than a sixteenth is lost to the first round."""
    total, most = ProgressTotal(), list[int]()

    def work(columns: int, part: Stop) -> Plan:
        assert part.nodes is not None
        if columns != slow:
            return plan(9, 9)
        most.append(part.nodes)
        return plan(9, 5, part.nodes, "nodes")

    run(Attempts(range(4), Stop(nodes=16_000), total, rounds=True), total, work)
    assert len(most) == 2
    assert most[1] > 15_000


def test_seconds_are_shared_as_nodes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("solvers.packing.progress.time.perf_counter", lambda: now)
    total = ProgressTotal()

    def work(_: int, part: Stop) -> Plan:
        nonlocal now
        assert part.seconds is not None
        now += part.seconds
        return plan(9, 5, stopped_by="time")

    seen = run(Attempts(range(3), Stop(seconds=8.0), total, rounds=True), total, work)
    assert [columns for columns, _ in seen] == [0, 1, 2] * 2
    assert now == pytest.approx(8.0)


def test_proven_column_counts_are_not_tried_again() -> None:
    seen = run(
        Attempts(range(3), Stop(nodes=100), total := ProgressTotal(), rounds=True),
        total,
        lambda columns, part: plan(9, 5, part.nodes or 0, "nodes") if columns == 1 else plan(9, 9),
    )
    assert [columns for columns, _ in seen] == [0, 1, 2, 1]


def test_smaller_arena_of_an_earlier_attempt_is_kept() -> None:
    attempts = Attempts((2, 3), Stop(), ProgressTotal(), rounds=True)
    attempts.add(2, plan(8, 5, stopped_by="nodes"))
    attempts.add(2, plan(9, 5, stopped_by="nodes"))
    attempts.add(3, plan(10, 10))
    best = attempts.best
    assert best is not None
    assert best.arena_bytes == 8
    assert attempts.combined(5).status is Status.FEASIBLE


def test_later_proof_of_the_same_arena_counts() -> None:
    attempts = Attempts((2, 3), Stop(), ProgressTotal(), rounds=True)
    attempts.add(2, plan(8, 5, stopped_by="nodes"))
    attempts.add(3, plan(10, 10))
    attempts.add(2, plan(8, 8, stopped_by="proof"))
    together = attempts.combined(5)
    assert together.status is Status.OPTIMAL
    assert (together.lower_bound_bytes, together.stopped_by) == (8, "proof")


def test_proof_for_a_column_count_proves_nothing_for_untried_counts() -> None:
    attempts = Attempts((2, 3), Stop(), ProgressTotal(), rounds=True)
    attempts.add(2, plan(8, 8))
    together = attempts.combined(5)
    assert together.status is Status.FEASIBLE
    assert (together.lower_bound_bytes, together.stopped_by) == (5, "finished")


def test_infeasibility_for_a_column_count_is_not_overall_infeasibility() -> None:
    attempts = Attempts((2, 3), Stop(), ProgressTotal(), rounds=True)
    attempts.add(2, plan(0, 5, status=Status.INFEASIBLE, stopped_by="proof"))
    attempts.add(3, plan(0, 5, status=Status.UNKNOWN, stopped_by="nodes"))
    assert attempts.combined(5).status is Status.UNKNOWN
    attempts.add(3, plan(0, 5, status=Status.INFEASIBLE, stopped_by="proof"))
    assert attempts.combined(5).status is Status.INFEASIBLE


def test_infeasibility_of_tried_column_counts_is_not_overall_infeasibility() -> None:
    """After Ctrl-C for example; a bound holds for the untried counts, too."""
    attempts = Attempts((2, 3), Stop(), ProgressTotal(), rounds=True)
    attempts.add(2, plan(0, 5, status=Status.INFEASIBLE, stopped_by="proof"))
    together = attempts.combined(4, "interrupt")
    assert (together.status, together.stopped_by) == (Status.UNKNOWN, "interrupt")
    assert together.reason
    attempts.add(2, plan(0, 5, status=Status.INFEASIBLE, stopped_by="bound"))
    assert attempts.combined(5).status is Status.INFEASIBLE


def test_limit_leaving_a_column_count_open_is_reported() -> None:
    """A plan stopped by the clock cannot be repeated, whatever is proven of the best."""
    for limit in ("nodes", "time", "interrupt"):
        attempts = Attempts((2, 3), Stop(), ProgressTotal(), rounds=True)
        attempts.add(2, plan(8, 8, stopped_by="proof"))
        attempts.add(3, plan(9, 5, stopped_by=limit))
        together = attempts.combined(5)
        assert (together.status, together.stopped_by) == (Status.FEASIBLE, limit)


def test_improvement_is_reported_after_a_column_count_without_a_plan() -> None:
    """With three columns, which are tried first, the buffers need more than the capacity."""
    buffers = Buffers.of([0, 0], [3, 3], 4, period=2)
    assert columns_to_try(buffers)[:2] == [3, 2]
    assert solve(buffers, columns=3).arena_bytes > 16
    told = list[Plan]()
    made = solve(buffers, capacity=16, stop=Stop(nodes=10**6), solver="greedy", on_improvement=told.append)
    check(made, buffers)
    assert [one.arena_bytes for one in told] == [made.arena_bytes] == [16]


def test_nodes_of_all_numbers_of_columns_are_counted() -> None:
    buffers = rotating()
    tried = columns_to_try(buffers)
    assert len(tried) > 1
    total = ProgressTotal()
    run(
        Attempts(tried, Stop(nodes=1000 * len(tried)), total, rounds=False),
        total,
        lambda columns, part: solve(buffers, columns=columns, stop=part, solver="greedy"),
    )
    together = solve(buffers, stop=Stop(nodes=1000 * len(tried)), solver="greedy")
    assert together.stopped_by == "nodes"
    assert together.nodes == total.nodes >= 1000 * len(tried)


def test_slow_column_count_is_proven() -> None:
    """Four columns take 0.7 of the budget; two and three finish at once, and had half of the budget."""
    buffers = GENERATORS["circular"](19, 315)
    budget = 1_000_000_000
    proven = solve(buffers, seed=4, stop=Stop(nodes=budget))
    check(proven, buffers)
    assert proven.status is Status.OPTIMAL
    assert budget // 2 < proven.nodes <= budget


def test_nodes_of_the_first_attempt_per_column_count_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, search, asked = GENERATORS["circular"](19, 315), solve.__globals__["search"], list[int | None]()

    def glance(task: Task) -> None:
        asked.append(task.budget.stop.nodes)
        search(task)
        task.budget.nodes += 10**5

    monkeypatch.setitem(solve.__globals__, "search", glance)
    columns = len(columns_to_try(buffers))
    assert solve(buffers, stop=Stop(nodes=0)).nodes == columns * 10**5
    assert solve(buffers, stop=Stop(nodes=10**6)).nodes < 2 * 10**6
    assert asked == [0] * columns + [20_000] * columns
