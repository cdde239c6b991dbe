"""The published simulator against a slow simulator that counts readers, and the tuner's guarantees."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewriting_graphs import chain, graph_of, graphs, ruled
from rewriting_play import slow_play

from solvers.rewriting import Graph, Sync, rewrite
from solvers.rewriting.levels import levels_of
from solvers.rewriting.published import _some_group, budget_of, simulate, tune
from solvers.rewriting.rules import Rules, candidates, copies, rewriting_of


@settings(max_examples=100)
@given(ruled())
def test_published_simulator_equals_a_slow_simulator(case: tuple[Graph, Rules]) -> None:
    graph, rules = case
    levels = levels_of(graph)
    edges = candidates(graph, levels)
    swapped = copies(graph, levels, edges, rules)
    simulated = simulate(graph, levels, edges, swapped, rules.sync)
    decided = rewriting_of(edges, swapped, rules.sync)
    assert simulated.peak_bytes == slow_play(graph, levels, decided)
    away = [int(graph.size[swap.value]) for swap in decided.swaps]
    assert max(away, default=0) <= simulated.host_bytes <= sum(away)


@settings(max_examples=40)
@given(graphs(), st.floats(0.2, 1.2), st.integers(0, 3))
def test_tuned_rules_fit_the_budget_within_few_simulations(graph: Graph, part: float, mode: int) -> None:
    levels = levels_of(graph)
    edges = candidates(graph, levels)
    plain = simulate(graph, levels, edges, copies(graph, levels, edges, Rules(len(levels))), Sync.NONE)
    budget = plain.peak_bytes * part
    found = tune(graph, budget, sync=Sync(mode))
    assert found.simulations <= 6 + 3 * math.ceil(math.log2(max(len(levels), 2)) + 1)
    assert found.fits == (found.simulated.peak_bytes < budget)
    if found.rules is not None:
        assert found.rules.sync >= mode
        swapped = copies(graph, levels, edges, found.rules)
        assert simulate(graph, levels, edges, swapped, found.rules.sync) == found.simulated
        rewrite(graph, found.rewriting)
    else:
        assert found.rewriting.swaps == ()
        assert not found.fits or plain.peak_bytes < budget


@pytest.mark.parametrize("part", [0.9, 0.6, 0.3])
def test_deep_chain_fits_into_part_of_its_memory(part: float) -> None:
    graph = chain(200)
    plain = 202 << 20
    found = tune(graph, plain * part)
    assert found.fits
    assert found.rules is not None
    assert 1 < found.rules.threshold < 400


def test_budget_excludes_lasting_values_and_memory_beside() -> None:
    graph = chain(4, size=100)
    assert budget_of(graph, 1000, beside_bytes=100) == pytest.approx(720)


def test_swapped_value_stays_for_another_operation() -> None:
    graph = chain(3, size=1).with_columns(lasting=np.zeros(7, bool))
    levels = levels_of(graph)
    edges = candidates(graph, levels)
    swapped = copies(graph, levels, edges, Rules(1, 0, 0))
    assert simulate(graph, levels, edges, swapped, Sync.NONE).peak_bytes == 4


def test_value_on_the_host_takes_no_device_memory() -> None:
    graph = chain(3, size=1).with_columns(lasting=np.zeros(7, bool))
    levels = levels_of(graph)

    def peak(graph: Graph) -> int:
        edges = candidates(graph, levels)
        return simulate(graph, levels, edges, copies(graph, levels, edges, Rules(9)), Sync.NONE).peak_bytes

    assert peak(graph.with_columns(host=np.arange(7) == 1)) == peak(graph) - 1


def test_host_memory_is_returned_after_the_copy_in() -> None:
    """One value is swapped out, read, and freed before another leaves."""
    reads = [[0], [1], [2], [1, 3], [4], [5], [6], [5, 7]]
    graph = graph_of(size=[1] * 9, producer=[-1, *range(8)], reads=reads)
    levels = levels_of(graph)
    edges = candidates(graph, levels)
    swapped = copies(graph, levels, edges, Rules(2, 0, 0))
    assert len(swapped.first) == 2
    assert simulate(graph, levels, edges, swapped, Sync.NONE).host_bytes == 1


def test_readers_share_no_copy_where_no_group_size_passes() -> None:
    assert _some_group(lambda _: False, 9) == 0
    assert _some_group(lambda group: group <= 4, 9) in range(1, 5)
