"""Decisions against the shortest possible step, on small graphs."""

from __future__ import annotations

from functools import partial

import numpy as np
import offload_oracle
import pytest
from rewriting_nets import limited_net, small_net
from rewriting_oracle import least_seconds

from solvers.rewriting import apply_rewriting
from solvers.rewriting.decide import decide, least_limit
from solvers.rewriting.judge import simulate
from solvers.swap import Link


def _gaps(seeds: range) -> list[float]:
    gaps = []
    for seed in seeds:
        graph, link, limit = limited_net(seed)
        solved = least_seconds(graph, link, limit)
        assert solved is not None  # what is refused cannot be held, and what is not can
        judged = simulate(apply_rewriting(graph, solved[0]), link)
        assert judged.peak_bytes <= limit
        # What waits for nothing but its queue may be a little later than is proven; times are whole ticks.
        assert judged.seconds > solved[1] - 0.02
        gaps.append(decide(graph, limit, link).seconds / solved[1] - 1)
    return gaps


def _near(gaps: list[float]) -> None:
    assert min(gaps) > -0.01
    assert max(gaps) < 0.12
    assert np.mean(gaps) < 0.01


def test_decisions_are_near_the_shortest_possible_step():
    _near(_gaps(range(8)))


@pytest.mark.full
def test_decisions_are_near_the_shortest_possible_step_on_many_graphs():
    _near(_gaps(range(8, 120)))


def test_below_the_least_limit_the_oracle_finds_nothing_either():
    for seed in range(4):
        graph, link = small_net(seed), Link.of_rate(1.0)
        least, _ = least_limit(graph, link)
        assert least_seconds(graph, link, least - 1) is None


def test_oracle_claims_no_proof_of_an_unproven_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that stays unproven could belong to the shortest step, so that the others prove nothing."""
    graph, link, limit = limited_net(0)
    assert least_seconds(graph, link, limit) is not None
    short = partial(offload_oracle.least_stall, seconds=0.0)
    monkeypatch.setattr("rewriting_oracle.least_stall", short)
    with pytest.raises(offload_oracle.UnprovenError):
        least_seconds(graph, link, limit)
