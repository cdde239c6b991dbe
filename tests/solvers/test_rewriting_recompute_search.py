"""Recompute at a price: the cheapest set of values; attention's intermediates are in the set."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from rewriting_graphs import chain, graph_of
from rewriting_nets import attention, small_net

from solvers.errors import PlanError
from solvers.rewriting import Graph, Rewriting, Role, apply_rewriting
from solvers.rewriting.decide import decide
from solvers.rewriting.judge import simulate
from solvers.rewriting.recompute_search import RecomputeCuts
from solvers.swap import Link

NOTHING = Link.of_rate(1.0)  # a link so slow that nothing moves


def _cost(graph: Graph, chosen: tuple[int, ...], price: np.ndarray) -> float:
    """Return the seconds of repeated operations plus the prices of other values read by the backward pass."""
    made = apply_rewriting(graph, Rewriting(recomputed=chosen))
    again = made.role == Role.RECOMPUTED
    late = made.backward[made.reader]
    kept = np.unique(made.base[made.reads[late]])
    kept = kept[(made.producer[kept] >= 0) & ~made.backward[made.producer[kept]] & (kept < len(graph.size))]
    return float(made.seconds[again].sum() + price[kept].sum())


@pytest.mark.parametrize("seed", range(8))
def test_no_set_costs_less(seed):
    graph = small_net(seed)
    price = np.random.default_rng(seed).choice([0.0, 0.1, 0.5, 1.0, 3.0], len(graph.size))
    cuts = RecomputeCuts(graph, np.ones(len(graph.size), bool))
    chosen, seconds = cuts.cheapest(price)
    made = [v for v in range(len(graph.size)) if graph.producer[v] >= 0]
    forward = [v for v in made if not graph.backward[graph.producer[v]]]
    best = np.inf
    for count in range(len(forward) + 1):
        for other in itertools.combinations(forward, count):
            try:
                best = min(best, _cost(graph, other, price))
            except PlanError:
                continue
    assert _cost(graph, chosen, price) == pytest.approx(best)
    again = apply_rewriting(graph, Rewriting(recomputed=chosen))
    assert seconds == pytest.approx(again.seconds[again.role == Role.RECOMPUTED].sum())


def test_unrepeatable_values_are_kept_with_their_dependents():
    graph = chain(6)
    dear = np.full(len(graph.size), 100.0)
    random = graph.with_columns(repeatable=np.arange(len(graph)) != 2)  # makes value 3
    assert set(RecomputeCuts(graph, np.ones(len(graph.size), bool)).cheapest(dear)[0]) == {1, 2, 3, 4, 5}
    assert 3 not in RecomputeCuts(random, np.ones(len(graph.size), bool)).cheapest(dear)[0]
    assert 3 not in RecomputeCuts(graph, np.arange(len(graph.size)) != 3).cheapest(dear)[0]
    ordered = graph.with_columns(control=[(2, 3)])
    assert 3 not in RecomputeCuts(ordered, np.ones(len(graph.size), bool)).cheapest(dear)[0]


def test_unrepeatable_view_keeps_its_base():
    graph = graph_of(
        size=[8, 8, 0, 8],
        producer=[-1, 0, 1, 2],
        reads=[[0], [1], [2]],
        base=[0, 1, 1, 3],
        backward=[False, False, True],
        repeatable=[True, False, True],
    )
    cuts = RecomputeCuts(graph, np.ones(4, bool))
    assert cuts.cheapest(np.full(4, 100.0))[0] == ()
    free = graph.with_columns(repeatable=np.ones(3, bool))
    assert RecomputeCuts(free, np.ones(4, bool)).cheapest(np.full(4, 100.0))[0] == (1,)


def test_intermediates_of_additive_attention_are_recomputed():
    """Meng et al. (2017): memory grows as T x B x H instead of T x T x B x H."""
    plain, least = {}, {}
    for steps in (16, 32):
        graph, large = attention(steps, 1 << 16)
        plain[steps] = simulate(graph, NOTHING).peak_bytes
        made = decide(graph, plain[steps] * 9 // 20, NOTHING)
        assert set(made.rewriting.recomputed) <= set(large)
        assert not made.rewriting.offloads
        assert made.seconds < 1.01 * made.plain_seconds
        least[steps] = simulate(
            apply_rewriting(graph, Rewriting(recomputed=tuple(large))), NOTHING
        ).peak_bytes
    assert plain[32] > 3.5 * plain[16]
    assert least[32] < 2.2 * least[16]
