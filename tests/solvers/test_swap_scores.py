"""The published scores by their definitions, read off slowly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swap_steps import links, step_from, steps

from solvers.swap import PRESETS, Link, replay
from solvers.swap.absences import absences_of
from solvers.swap.published import scheduled, selected
from solvers.swap.scores import Published, aoa, doa, spanning, swdoa_order, wdoa


@given(st.data())
def test_scores_equal_their_definitions(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    a, k, limit = absences_of(step), len(step), data.draw(st.integers(0, 20))
    duration, area = doa(step, link, a), aoa(step, link, a)
    over = wdoa(step, a, limit)
    for row in range(len(a)):
        ops = [op % k for op in range(int(a.last[row]), int(a.use[row]))]
        size = int(a.size[row])
        left = sum(float(step.seconds[op]) for op in ops[1:])
        left -= link.out_fixed + link.out_per_byte * size + link.in_fixed + link.in_per_byte * size
        assert duration[row] == pytest.approx(left)
        assert area[row] == pytest.approx(left * size if duration[row] >= 0 else left / size)
        assert over[row] == pytest.approx(sum(int(step.load[op]) - limit for op in ops))


@given(st.data())
def test_swdoa_subtracts_chosen_absences_from_the_load(data: st.DataObject) -> None:
    step = data.draw(steps())
    a, k = absences_of(step), len(step)
    load, left = step.load.astype(float), set(range(len(a)))
    for chosen in swdoa_order(step, a).tolist():
        ops = {row: [op % k for op in range(int(a.last[row]), int(a.use[row]))] for row in left}
        scores = {row: sum(load[op] for op in ops[row]) for row in left}
        assert scores[chosen] == pytest.approx(max(scores.values()))
        for op in set(ops[chosen]):
            load[op] -= a.size[chosen]
        left.remove(chosen)
    assert not left


@given(st.data())
def test_absences_spanning_an_operation_have_no_access_there(data: st.DataObject) -> None:
    step = data.draw(steps())
    a, k = absences_of(step), len(step)
    for op in range(k):
        slow = [any(int(a.last[row]) < at < int(a.use[row]) for at in (op, op + k)) for row in range(len(a))]
        assert spanning(step, a, op).tolist() == slow


@given(st.data())
@settings(deadline=None, max_examples=50)
def test_published_planner_makes_schedules_accepted_by_the_replay(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    a = absences_of(step)
    order = np.argsort(-doa(step, link, a), kind="stable")
    order = order[spanning(step, a, int(step.load.argmax()))[order]]
    limit = data.draw(st.integers(0, max(step.peak_bytes, 1)))
    rows = selected(step, a, order, limit)
    holding = replay(step, link, scheduled(step, link, a, rows, limit))
    assert holding.peak_bytes <= step.peak_bytes
    made = scheduled(step, link, a, rows, None)
    busy = max(float(link.out(a.size[rows]).sum()), float(link.back(a.size[rows]).sum()))
    turns = len(np.unique(made.fetch)) == len(np.unique(made.fetch % len(step)))
    if link.duplex and busy < 0.99 * step.duration and turns:
        assert replay(step, link, made).stall_seconds == 0


def test_copies_back_of_different_turns_are_ordered_by_absolute_use() -> None:
    """The copy for operation 0 of the next turn begins at operation 7, before the copy for operation 8."""
    buffers = [(4, [(0, False), (1, False)]), (1, [(8, False)])]
    step, link = step_from([0.5] * 9, buffers, circular=True, persistent={0, 1}), Link(0.0, 0.0, 0.0, 0.125)
    a = absences_of(step)
    made = scheduled(step, link, a, np.arange(len(a)), None)
    assert (made.use.tolist(), made.fetch.tolist()) == ([9, 17], [7, 16])
    assert replay(step, link, made).wait.tolist() == [0.0] * 8 + [0.125]


def test_candidates_of_the_published_planner_are_large_and_span_the_peak() -> None:
    big, small = 2 << 20, 1 << 10
    step = step_from(
        [1.0] * 8,
        [(big, [(0, True), (7, False)]), (small, [(1, True), (6, False)]), (big, [(3, True), (4, True)])],
    )
    link = PRESETS["pcie3"]
    orders = Published(step, link, absences_of(step)).orders(big)
    assert all(order.tolist() == [0] for order in orders.values())
