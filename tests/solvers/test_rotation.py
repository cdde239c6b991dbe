"""Rotation of column counts: several counts share one limit, and a combined claim holds for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers import Plan, Status, Stop
from solvers.packing.progress import ProgressTotal
from solvers.packing.rotation import Attempts

if TYPE_CHECKING:
    from collections.abc import Callable


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


OPEN_8, OPEN_9 = plan(8, 5, stopped_by="nodes"), plan(9, 5, stopped_by="nodes")
OPTIMAL_10, PROVEN_8 = plan(10, 10), plan(8, 8, stopped_by="proof")
REFUTED = plan(0, 5, status=Status.INFEASIBLE, stopped_by="proof")
UNDECIDED = plan(0, 5, status=Status.UNKNOWN, stopped_by="nodes")


@pytest.mark.parametrize(
    ("attempted", "status", "bound", "stopped_by"),
    [
        pytest.param(
            [(2, OPEN_8), (2, OPEN_9), (3, OPTIMAL_10)], "feasible", 5, "nodes", id="earlier smaller"
        ),
        pytest.param([(2, OPEN_8), (3, OPTIMAL_10), (2, PROVEN_8)], "optimal", 8, "proof", id="later proof"),
        pytest.param([(2, plan(8, 8))], "feasible", 5, "finished", id="untried count"),
        pytest.param([(2, REFUTED), (3, UNDECIDED)], "unknown", 5, "nodes", id="one count refuted"),
        pytest.param(
            [(2, REFUTED), (3, UNDECIDED), (3, REFUTED)], "infeasible", 5, "proof", id="all refuted"
        ),
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
    attempts = Attempts((2, 3), Stop(), ProgressTotal(), rounds=True)
    for columns, made in attempted:
        attempts.add(columns, made)
    combined = attempts.combined(5)
    assert (combined.status, combined.lower_bound_bytes, combined.stopped_by) == (status, bound, stopped_by)
    smallest = min((made.arena_bytes for _, made in attempted if made.offset is not None), default=0)
    assert combined.arena_bytes == smallest


def test_infeasibility_of_tried_column_counts_is_not_overall_infeasibility() -> None:
    """After Ctrl-C for example; a bound holds for the untried counts, too."""
    attempts = Attempts((2, 3), Stop(), ProgressTotal(), rounds=True)
    attempts.add(2, REFUTED)
    combined = attempts.combined(4, "interrupt")
    assert (combined.status, combined.stopped_by) == (Status.UNKNOWN, "interrupt")
    assert combined.reason
    attempts.add(2, plan(0, 5, status=Status.INFEASIBLE, stopped_by="bound"))
    assert attempts.combined(5).status is Status.INFEASIBLE
