"""Progress of a search: reports, attempts with several numbers of columns, combined claims."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from instances import crossing, hard

from solvers import SOLVERS, Plan, Progress, Status, Stop, check, lower_bound, solve
from solvers.packing.options import OPTIONS
from solvers.packing.progress import ProgressTotal
from solvers.packing.rotation import Attempts, columns_to_try
from solvers.packing.streams import NEVER, solve_streams
from traces.buffers import Buffers

FEW = Stop(nodes=300_000)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report progress at each check of the limits."""
    options = dataclasses.replace(OPTIONS, report_pause=0.0)
    monkeypatch.setattr("solvers.packing.progress.OPTIONS", options)


def check_reports(reports: list[Progress], plan: Plan) -> None:
    """Arenas never rise, and all else never falls."""
    for before, after in itertools.pairwise([*reports, Progress(None, 0, plan.nodes, plan.seconds)]):
        assert before.nodes <= after.nodes
        assert before.seconds <= after.seconds
    for before, after in itertools.pairwise(reports):
        assert before.lower_bound_bytes <= after.lower_bound_bytes
        assert before.arena_bytes is None or after.arena_bytes is not None
    arenas = [progress.arena_bytes for progress in reports if progress.arena_bytes is not None]
    assert arenas == sorted(arenas, reverse=True)
    assert all(reports[-1].lower_bound_bytes <= arena for arena in arenas)


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_reports_progress_in_the_callers_thread(solver: str) -> None:
    reports, threads = list[Progress](), set[int]()

    def report(progress: Progress) -> None:
        reports.append(progress)
        threads.add(threading.get_ident())

    plan = solve(hard(), solver=solver, stop=FEW, on_progress=report)
    assert reports
    assert threads == {threading.get_ident()}
    check_reports(reports, plan)


def test_bound_proven_for_a_column_count_is_not_reported_for_all() -> None:
    random, reports = np.random.default_rng(11), list[Progress]()
    start = random.integers(0, 8, 6)
    end, size = start + random.integers(1, 20, 6), random.integers(1, 20, 6)
    buffers = Buffers.of(start, end, size, alignment=2 ** random.integers(0, 5, 6), period=8)
    first = columns_to_try(buffers)[0]
    assert solve(buffers, columns=first, stop=FEW).lower_bound_bytes > lower_bound(buffers)
    check_reports(reports, solve(buffers, stop=FEW, on_progress=reports.append))
    assert {progress.lower_bound_bytes for progress in reports} == {lower_bound(buffers)}


def test_arena_of_several_groups_is_reported_once_all_have_plans() -> None:
    buffers, reports = hard(group=np.arange(120) % 3), list[Progress]()
    plan = solve(buffers, solver="greedy", stop=FEW, on_progress=reports.append)
    check_reports(reports, plan)
    arenas = [progress.arena_bytes for progress in reports]
    assert None in arenas
    assert arenas[-1] == plan.arena_bytes
    assert {progress.lower_bound_bytes for progress in reports} == {lower_bound(buffers)}
    assert [progress.gap is None for progress in reports] == [arena is None for arena in arenas]


def test_bound_raised_by_a_search_is_reported() -> None:
    reports = list[Progress]()
    buffers = crossing()
    plan = solve(buffers, on_progress=reports.append)
    check_reports(reports, plan)
    assert plan.stopped_by == "proof"
    assert reports[0].lower_bound_bytes == lower_bound(buffers) < reports[-1].lower_bound_bytes


@pytest.mark.parametrize("price", [0, NEVER])
def test_raised_bound_is_reported_where_valid_for_all_attempts(price: int) -> None:
    reports = list[Progress]()
    buffers = crossing(stream=[0, 0, 0, 0, 0, 0, 1])
    plan = solve_streams(buffers, wait_bytes=price, stop=FEW, on_progress=reports.append)
    check_reports(reports, plan)
    bounds = {progress.lower_bound_bytes for progress in reports}
    if price == NEVER:
        assert min(bounds) > lower_bound(buffers)
    else:
        assert min(bounds) == lower_bound(buffers) < max(bounds) <= plan.lower_bound_bytes


def test_progress_reports_do_not_change_the_plan() -> None:
    alone, heard = (solve(hard(), stop=FEW, on_progress=report) for report in (None, lambda _: None))
    assert alone.offset is not None
    assert heard.offset is not None
    assert (alone.offset == heard.offset).all()
    assert alone.nodes == heard.nodes


@pytest.mark.parametrize("report", ["on_progress", "on_improvement"])
def test_keyboard_interrupt_during_a_report_returns_the_best_plan(report: Any) -> None:
    def interrupt(found: Progress | Plan) -> None:
        if found.arena_bytes is not None:
            raise KeyboardInterrupt

    plan = solve(hard(), **{report: interrupt})
    check(plan, hard())
    assert (plan.status, plan.stopped_by) == (Status.FEASIBLE, "interrupt")


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


needs = st.lists(st.integers(0, 3000), min_size=1, max_size=4)


@given(needs=needs, budget=st.integers(0, 5000))
def test_attempts_together_stay_within_the_budget(needs: list[int], budget: int) -> None:
    total = ProgressTotal()
    attempts = Attempts(range(len(needs)), Stop(nodes=budget), total)

    def work(columns: int, part: Stop) -> Plan:
        assert part.nodes is not None
        left = part.nodes < needs[columns]
        return plan(9, 5, min(needs[columns], part.nodes), "nodes" if left else "proof")

    seen = run(attempts, total, work)
    assert total.nodes <= budget
    assert [columns for columns, _ in seen] == list(range(len(needs)))


OPEN_8 = plan(8, 5, stopped_by="nodes")
OPTIMAL_10, PROVEN_8 = plan(10, 10), plan(8, 8, stopped_by="proof")
REFUTED = plan(0, 5, status=Status.INFEASIBLE, stopped_by="proof")
UNDECIDED = plan(0, 5, status=Status.UNKNOWN, stopped_by="nodes")


@pytest.mark.parametrize(
    ("attempted", "status", "bound", "stopped_by"),
    [
        pytest.param([(2, OPEN_8), (3, OPTIMAL_10)], "feasible", 5, "nodes", id="open count"),
        pytest.param([(2, PROVEN_8), (3, OPTIMAL_10)], "optimal", 8, "proof", id="proof"),
        pytest.param([(2, plan(8, 8))], "feasible", 5, "finished", id="untried count"),
        pytest.param([(2, REFUTED), (3, UNDECIDED)], "unknown", 5, "nodes", id="one count refuted"),
        pytest.param([(2, REFUTED), (3, REFUTED)], "infeasible", 5, "proof", id="all refuted"),
        *(
            pytest.param(
                [(2, PROVEN_8), (3, plan(9, 5, stopped_by=limit))],
                "feasible",
                5,
                limit,
                id=f"open by {limit}",
            )
            for limit in ("nodes", "time", "interrupt")
        ),
    ],
)
def test_combined_claim_holds_for_all_column_counts(
    attempted: list[tuple[int, Plan]], status: str, bound: int, stopped_by: str
) -> None:
    """Proofs hold for single counts, and a limit that leaves a count open is reported."""
    attempts = Attempts((2, 3), Stop(), ProgressTotal())
    for columns, made in attempted:
        attempts.add(columns, made)
    combined = attempts.combined(5)
    assert (combined.status, combined.lower_bound_bytes, combined.stopped_by) == (status, bound, stopped_by)
    smallest = min((made.arena_bytes for _, made in attempted if made.offset is not None), default=0)
    assert combined.arena_bytes == smallest


def test_infeasibility_of_tried_column_counts_is_not_overall_infeasibility() -> None:
    """After Ctrl-C for example; a bound holds for the untried counts, too."""
    attempts = Attempts((2, 3), Stop(), ProgressTotal())
    attempts.add(2, REFUTED)
    combined = attempts.combined(4, "interrupt")
    assert (combined.status, combined.stopped_by) == (Status.UNKNOWN, "interrupt")
    assert combined.reason
    attempts.add(2, plan(0, 5, status=Status.INFEASIBLE, stopped_by="bound"))
    assert attempts.combined(5).status is Status.INFEASIBLE
