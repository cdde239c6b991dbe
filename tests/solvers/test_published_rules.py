"""The published rules, their simulator against a slow simulator that counts readers, and the tuner."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from published_rules import Rules, RuleSimulator, tune
from rewriting_graphs import graphs, reverted
from rewriting_play import slow_play
from rewriting_terms import contents_by_running

from solvers.rewriting import Graph, apply_rewriting


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
