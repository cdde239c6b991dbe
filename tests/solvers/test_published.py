"""Published methods that benchmarks compare with: AutoSwap, and rules for copies and recompute."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_offloads import aoa, doa, scheduled, selected, swdoa_order, wdoa
from published_rules import Rules, RuleSimulator, tune
from rewriting_graphs import graphs, reverted
from rewriting_play import slow_play
from rewriting_terms import contents_by_running
from swap_steps import links, steps

from solvers.rewriting import Graph, apply_rewriting
from solvers.swap import replay
from solvers.swap.absences import absences_of, spanning


@given(st.data())
def test_scores_equal_their_definitions(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    a, k, limit = absences_of(step), len(step), data.draw(st.integers(0, 20))
    duration, area, over = doa(step, link, a), aoa(step, link, a), wdoa(step, a, limit)
    for row, size in enumerate(a.size.tolist()):
        ops = [op % k for op in range(int(a.last[row]), int(a.use[row]))]
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
def test_published_schedules_are_accepted_and_stall_free_where_the_link_suffices(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    a = absences_of(step)
    order = np.argsort(-doa(step, link, a), kind="stable")
    order = order[spanning(step, a, int(step.load.argmax()))[order]]
    limit = data.draw(st.integers(0, max(step.peak_bytes, 1)))
    rows = selected(step, a, order, limit)
    assert replay(step, link, scheduled(step, link, a, rows, limit)).peak_bytes <= step.peak_bytes
    made = scheduled(step, link, a, rows, None)
    busy = max(float(link.out(a.size[rows]).sum()), float(link.back(a.size[rows]).sum()))
    turns = len(np.unique(made.fetch)) == len(np.unique(made.fetch % len(step)))
    if link.duplex and busy < 0.99 * step.duration and turns:
        assert replay(step, link, made).stall_seconds == 0


@st.composite
def ruled(draw: st.DrawFn) -> tuple[Graph, Rules]:
    """Draw a graph and settings of the rules."""
    return draw(graphs()), Rules(draw(st.integers(0, 3)), draw(st.integers(0, 5)), draw(st.integers(0, 4)))


@settings(max_examples=100)
@given(ruled())
def test_published_simulator_equals_a_slow_simulator(case: tuple[Graph, Rules]) -> None:
    graph, rules = case
    simulator = RuleSimulator(graph)
    simulated, decided = simulator.simulate(rules), simulator.rewriting(rules)
    assert simulated.peak_bytes == slow_play(graph, simulator.levels, decided)
    away = [int(graph.size[offload.value]) for offload in decided.offloads]
    assert max(away, default=0) <= simulated.host_bytes <= sum(away)


@settings(max_examples=60)
@given(ruled())
def test_published_decisions_keep_contents(case: tuple[Graph, Rules]) -> None:
    graph, rules = case
    new = apply_rewriting(graph, RuleSimulator(graph).rewriting(rules))
    original, rewritten = contents_by_running(graph), contents_by_running(new)
    assert rewritten == [original[content] for content in new.content.tolist()]
    assert reverted(new).same_as(graph)


@settings(max_examples=40)
@given(graphs(), st.floats(0.2, 1.2))
def test_tuned_rules_fit_the_budget_within_few_simulations(graph: Graph, part: float) -> None:
    simulator = RuleSimulator(graph)
    levels = int(simulator.levels.level.max()) + 1
    budget = simulator.simulate(Rules(levels)).peak_bytes * part
    found = tune(graph, budget)
    assert found.simulations <= 6 + 3 * math.ceil(math.log2(max(levels, 2)) + 1)
    assert found.fits == (found.simulated.peak_bytes < budget)
    if found.rules is None:
        assert not found.rewriting.offloads
    else:
        assert simulator.simulate(found.rules) == found.simulated
        apply_rewriting(graph, found.rewriting)
