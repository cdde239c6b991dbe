"""Decisions to keep, offload or recompute: the limit holds, contents stay, larger limits are never slower."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from rewriting_graphs import chain, graphs, reverted
from rewriting_nets import small_net
from swap_steps import links

from solvers.errors import PlanError
from solvers.rewriting import apply_rewriting
from solvers.rewriting.decide import Decider, decide, least_limit
from solvers.rewriting.judge import simulate
from solvers.swap import Link


@settings(max_examples=10)
@given(graphs(most_ops=20), links())
def test_decision_predicts_peak_and_seconds_at_any_limit(graph, link):
    least, _ = least_limit(graph, link, outside_bytes=3)
    peak = simulate(graph, link, outside_bytes=3).peak_bytes
    assert least <= peak
    before = float("inf")
    chooser = Decider(graph, link, outside_bytes=3)
    for limit in sorted({least, (least + peak) // 2, peak}):
        made = chooser.decide(limit)
        rewritten = apply_rewriting(graph, made.rewriting)
        timed = simulate(rewritten, link, outside_bytes=3)
        assert timed.peak_bytes == made.peak_bytes <= limit
        assert timed.seconds == made.seconds <= before
        assert reverted(rewritten).same_as(graph)
        before = made.seconds
    assert before == pytest.approx(graph.seconds.sum())  # nothing moves where nothing needs to


def test_infeasible_limit_is_refused_with_the_least_bytes_and_the_operation():
    graph, link = chain(8), Link.of_rate(1e9)
    least, op = least_limit(graph, link, outside_bytes=100)
    assert decide(graph, least, link, outside_bytes=100).peak_bytes == least
    for limit in (least - 1, 0, -1):
        with pytest.raises(PlanError, match=rf"{graph.names[op]} \(op\) needs {least}: \d+ .* \d+ that stay"):
            decide(graph, limit, link, outside_bytes=100)


def test_swapping_everything_keeps_values_away_between_uses():
    graph, link = chain(8), Link.of_rate(1e9)
    made = Decider(graph, link).offload_everything()
    assert {offload.value for offload in made.rewriting.offloads} == set(range(1, 7))  # 7 is read at once
    assert made.peak_bytes == least_limit(graph, link)[0]
    assert Decider(graph, link, host_limit=made.host_bytes).offload_everything().peak_bytes == made.peak_bytes
    with pytest.raises(PlanError, match=rf"needs {made.host_bytes} bytes on the host"):
        Decider(graph, link, host_limit=made.host_bytes - 1).offload_everything()


def test_decision_without_host_memory_recomputes():
    graph, link = chain(12), Link.of_rate(1e9)
    made = decide(graph, simulate(graph, link).peak_bytes * 3 // 4, link, host_limit=0)
    assert made.host_bytes == made.moved_bytes == 0
    assert made.rewriting.recomputed


def test_host_limit_is_kept():
    graph, link = chain(12), Link.of_rate(1e9)
    peak = simulate(graph, link).peak_bytes
    free = decide(graph, peak - (4 << 20), link, repeatable=np.zeros(len(graph.size), bool))
    tight = decide(
        graph, peak - (4 << 20), link, host_limit=4 << 20, repeatable=np.zeros(len(graph.size), bool)
    )
    assert tight.host_bytes <= 4 << 20 <= free.host_bytes
    with pytest.raises(PlanError, match="on the host"):
        decide(graph, peak - (4 << 20), link, host_limit=1 << 20, repeatable=np.zeros(len(graph.size), bool))


@pytest.mark.parametrize(
    ("seed", "host_limit"),
    [(1, 2), (2, 2), *(pytest.param(4, host, marks=pytest.mark.full) for host in (2, 5))],
)
def test_refusal_with_a_small_host_names_a_sufficient_host_limit(seed, host_limit):
    graph, link = small_net(seed), Link.of_rate(1e9)
    least, peak = least_limit(graph, link)[0], simulate(graph, link).peak_bytes
    held = []
    for limit in range(least, peak + 1):
        try:
            decide(graph, limit, link, host_limit=host_limit)
        except PlanError as error:
            refused = error
            held.append(False)
        else:
            held.append(True)
            continue
        assert refused.least_bytes is None
        enough = int(re.findall(r"with (\d+) on the host, or fewer, one does", str(refused))[0])
        assert enough > host_limit
        assert decide(graph, limit, link, host_limit=enough).peak_bytes <= limit
    assert held == sorted(held)
    assert held[-1]


def test_random_values_and_excluded_values_are_left_alone():
    graph, link = chain(12), Link.of_rate(1e9)
    limit = simulate(graph, link).peak_bytes * 3 // 4
    once = graph.with_columns(repeatable=np.zeros(len(graph), bool))
    assert not decide(once, limit, Link.of_rate(1e3)).rewriting.recomputed
    stays = np.arange(len(graph.size)) > 6
    limit = least_limit(graph, link, movable=stays, repeatable=stays)[0]
    made = decide(graph, limit, link, movable=stays, repeatable=stays)
    touched = [*made.rewriting.recomputed, *(offload.value for offload in made.rewriting.offloads)]
    assert touched
    assert min(touched) > 6


def test_higher_limits_on_a_curve_are_never_slower():
    for seed in range(3):
        graph, link = small_net(seed), Link.of_rate(2.0, 0.125)
        least, _ = least_limit(graph, link)
        limits = [*range(least, simulate(graph, link).peak_bytes + 1, 3)]
        seconds = [made.seconds for made in Decider(graph, link).curve(limits)]
        assert seconds == sorted(seconds, reverse=True)
