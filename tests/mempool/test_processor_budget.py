"""Budget of background work: a bounded share of the program's time."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from mempool.planning.options import OPTIONS
from mempool.planning.planner_thread import ProcessorBudget, thread_cost_seconds


class Times:
    """A wall's clock and a processor's, set by hand."""

    def __init__(self) -> None:
        self.now = self.spent = 0.0

    def budget(self, **how: float) -> ProcessorBudget:
        return ProcessorBudget(**how, clock=lambda: self.now, spent=lambda: self.spent)


@given(
    passing=st.lists(st.floats(0, 10), min_size=1, max_size=50),
    costs=st.lists(st.floats(0, 0.5), min_size=50, max_size=50),
)
def test_spending_stays_within_allowance_share_and_a_single_piece_of_work(
    passing: list[float], costs: list[float]
) -> None:
    """Work that asks before each piece spends at most allowance, share of the time and last piece."""
    times = Times()
    budget = times.budget(allowance=0.1, share=0.01, most_debt=10.0)
    for wait, cost in zip(passing, costs, strict=False):
        times.now += wait
        if budget.is_left():
            with budget.charged():
                times.spent += cost
    assert times.spent <= 0.1 + 0.01 * times.now + max(costs) + 1e-9


def test_debt_is_forgiven_in_bounded_time() -> None:
    times = Times()
    budget = times.budget(allowance=0.1, share=0.01, most_debt=0.2)
    with budget.charged():
        times.spent += 1000
    times.now = 19.0
    assert not budget.is_left()
    times.now = 21.0
    assert budget.is_left()


def test_useful_work_is_not_charged() -> None:
    """A finished plan does not delay the next."""
    times = Times()
    budget = times.budget(allowance=0.1, share=0.0, most_debt=0.2)
    with budget.charged() as forgive:
        times.spent += 1000
        forgive()
    assert budget.is_left()


def test_hand_over_of_the_interpreter_is_charged_too() -> None:
    before, processor = thread_cost_seconds(), time.thread_time()
    for _ in range(50):
        time.sleep(1e-6)
    spent = time.thread_time() - processor
    assert thread_cost_seconds() - before >= spent + 40 * OPTIONS.handover_seconds
