"""Decisions about graphs: limits, costs of copies, recomputation, and the pause between the passes."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import numpy as np
import offload_oracle
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rewriting_graphs import chain, graph_of, graphs, reverted, rewritings, same_graph
from rewriting_models import least_seconds, limited_net, slow_loads, slow_seconds, small_net
from swap_steps import links, schedules

from solvers.errors import PlanError
from solvers.rewriting import Graph, Rewriting, Role, apply_rewriting
from solvers.rewriting.copy_overhead import CopyOverhead
from solvers.rewriting.decide import Decider
from solvers.rewriting.judge import simulate
from solvers.rewriting.pass_boundary import (
    PAUSE,
    RESUMED,
    Pause,
    add_backward_results,
    bytes_between_passes,
    insert_pause,
    remove_pause,
    simulate_with_pause,
    split_by_pass,
)
from solvers.rewriting.recompute_search import RecomputeCuts
from solvers.rewriting.step_conversion import graph_step, offloadable
from solvers.swap import Link, Schedule, replay


@settings(max_examples=10)
@given(graphs(most_ops=20), links())
def test_decision_predicts_peak_and_seconds_at_any_limit(graph, link):
    least, _ = Decider(graph, link, outside_bytes=3).least()
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
        assert same_graph(reverted(rewritten), graph)
        before = made.seconds
    assert before == pytest.approx(graph.seconds.sum())  # no moves without need


def test_infeasible_limit_is_refused_with_the_least_bytes_and_the_operation():
    graph, link = chain(8), Link.of_rate(1e9)
    least, op = Decider(graph, link, outside_bytes=100).least()
    assert Decider(graph, link, outside_bytes=100).decide(least).peak_bytes == least
    for limit in (least - 1, 0, -1):
        with pytest.raises(PlanError, match=rf"{graph.names[op]} \(op\) needs {least}: \d+ .* \d+ that stay"):
            Decider(graph, link, outside_bytes=100).decide(limit)


def test_decision_without_host_memory_recomputes():
    graph, link = chain(12), Link.of_rate(1e9)
    made = Decider(graph, link, host_limit=0).decide(simulate(graph, link).peak_bytes * 3 // 4)
    assert made.host_bytes == made.simulation.moved_bytes == 0
    assert made.rewriting.recomputed


def test_host_limit_is_kept():
    graph, link = chain(12), Link.of_rate(1e9)
    peak = simulate(graph, link).peak_bytes
    free = Decider(graph, link, repeatable=np.zeros(len(graph.size), bool)).decide(peak - (4 << 20))
    tight = Decider(graph, link, host_limit=4 << 20, repeatable=np.zeros(len(graph.size), bool)).decide(
        peak - (4 << 20)
    )
    assert tight.host_bytes <= 4 << 20 <= free.host_bytes
    with pytest.raises(PlanError, match="on the host"):
        Decider(graph, link, host_limit=1 << 20, repeatable=np.zeros(len(graph.size), bool)).decide(
            peak - (4 << 20)
        )


def test_random_values_and_excluded_values_are_left_alone():
    graph, link = chain(12), Link.of_rate(1e9)
    limit = simulate(graph, link).peak_bytes * 3 // 4
    once = graph.with_columns(repeatable=np.zeros(len(graph), bool))
    assert not Decider(once, Link.of_rate(1e3)).decide(limit).rewriting.recomputed
    stays = np.arange(len(graph.size)) > 6
    limit = Decider(graph.with_columns(movable=stays), link, repeatable=stays).least()[0]
    made = Decider(graph.with_columns(movable=stays), link, repeatable=stays).decide(limit)
    touched = [*made.rewriting.recomputed, *(offload.value for offload in made.rewriting.offloads)]
    assert touched
    assert min(touched) > 6


def test_higher_limits_on_a_curve_are_never_slower():
    for seed in range(3):
        graph, link = small_net(seed), Link.of_rate(2.0, 0.125)
        least, _ = Decider(graph, link).least()
        limits = [*range(least, simulate(graph, link).peak_bytes + 1, 3)]
        seconds = [made.seconds for made in Decider(graph, link).curve(limits)]
        assert seconds == sorted(seconds, reverse=True)


LINK = Link(1.0, 1.0, 2.0, 2.0)


@given(st.integers(0, 100), st.integers(0, 100))
def test_copy_uses_the_link_or_program_calls_by_its_size(own_bytes: int, size: int) -> None:
    calls = CopyOverhead(5.0, own_bytes, 3.0, 0.5)
    link, sizes = calls.overlapped(LINK), np.array([size])
    own = 0 < size <= own_bytes
    if size:
        assert link.out(sizes) == (0.0 if own else LINK.out(sizes))
        assert link.back(sizes) == (0.0 if own else LINK.back(sizes))
        assert calls.seconds_of(sizes) == (3.0 + 0.5 * size if own else 5.0)


@settings(max_examples=10)
@given(graphs(most_ops=20), links(), st.integers(0, 100))
def test_decisions_with_a_pause_hold_without_the_pause(graph, link, more):
    """The same bytes during every other operation, and no other offset."""
    assume(graph.backward.any() and not graph.backward[0])
    with_pause = insert_pause(graph, Pause(more))
    chooser = Decider(with_pause, link)
    made = chooser.decide(chooser.least()[0]).rewriting
    without = apply_rewriting(graph, remove_pause(graph, made))
    assert same_graph(reverted(without), graph)
    wanted, got = (simulate(one, link) for one in (apply_rewriting(with_pause, made), without))
    assert got.peak_bytes <= wanted.peak_bytes


@given(st.data())
def test_pause_changes_only_the_added_operations(data):
    graph = data.draw(graphs(most_ops=20))
    assume(graph.backward.any() and not graph.backward[0])
    at, with_pause = int(graph.backward.argmax()), insert_pause(graph, Pause(7))
    assert with_pause.names[at : at + 2] == (PAUSE, RESUMED)
    assert not any(len(with_pause.read_by(op)) for op in (at, at + 1))
    assert not np.isin(with_pause.producer, (at, at + 1)).any()
    link = data.draw(links())
    one, other = simulate(graph, link), simulate(with_pause, link)
    np.testing.assert_array_equal(np.delete(other.load, [at, at + 1]), one.load)
    assert other.seconds == one.seconds


@given(st.data())
def test_bytes_between_the_passes_are_forward_values_read_by_the_backward_pass(data):
    graph = data.draw(graphs(most_ops=20))
    assume(graph.backward.any() and not graph.backward[0])
    made = apply_rewriting(graph, split_by_pass(graph, data.draw(rewritings(graph))))
    turn, there = int(made.backward.argmax()), set[int]()
    for value in range(len(made.size)):
        late = made.lasting[value] or (made.readers_of(value) >= turn).any()
        if late and not made.host[value] and (made.producer[made.base == made.base[value]] < turn).any():
            there.add(int(made.base[value]))
    assert bytes_between_passes(made) == sum(int(made.size[base]) for base in there)


def test_leaving_arriving_and_given_values_count_only_while_needed():
    """The batch, five layers and their gradients, of which the third value leaves and is read by nobody."""
    graph = chain(5, size=10)
    link = Link.of_rate(1.0)
    plain = simulate(graph, link).load
    turn = int(graph.backward.argmax())
    given = simulate_with_pause(graph, Pause(extra_bytes=1000, forward_bytes=7), link).load
    np.testing.assert_array_equal(given, plain + np.where(graph.backward, 0, 7))
    later = simulate_with_pause(add_backward_results(graph, 5), Pause(), link).load
    np.testing.assert_array_equal(later, plain + np.where(graph.backward, 5, 0))
    lasting = graph.with_columns(lasting=graph.lasting | (np.arange(len(graph.size)) == turn))
    stays, leaves = (
        simulate_with_pause(lasting, pause, link).load for pause in (Pause(), Pause(leaving=(turn,)))
    )
    np.testing.assert_array_equal(leaves, plain)
    assert (stays >= leaves).all()
    assert stays[-1] == leaves[-1] + 10
    late = graph_of(  # of two inputs the second is read by the backward pass only
        size=[3, 5, 2], producer=[-1, -1, 0], reads=[[0], [1, 2]], backward=[0, 1], lasting=[1, 0, 0]
    )
    assert simulate(late, link).load.tolist() == [10, 10]
    assert simulate_with_pause(late, Pause(arriving=(1,)), link).load.tolist() == [5, 10]


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


@given(st.data(), graphs(), links())
def test_simulation_agrees_with_a_slow_model(data, graph, link):
    made = apply_rewriting(graph, data.draw(rewritings(graph)))
    timed = simulate(made, link, outside_bytes=7)
    assert (timed.load - 7).tolist() == slow_loads(made, host=False)
    assert timed.host_load.tolist() == slow_loads(made, host=True)
    assert timed.seconds == pytest.approx(slow_seconds(made, link), abs=1e-9)
    assert timed.seconds == pytest.approx(
        graph.seconds.sum() + timed.stall_seconds + timed.recomputed_seconds, abs=1e-9
    )


def _dropped_later(schedule: Schedule) -> Schedule:
    """Return the moves as a rewriting can have them: one copy out, and a release after the last read."""
    order = np.lexsort([schedule.last, schedule.buffer])
    s = schedule.select(order)
    copied = np.concatenate([[True], s.buffer[1:] != s.buffer[:-1]])[: len(s)]
    asked = np.where(copied, s.out, s.last)
    return dataclasses.replace(s, out=asked, release=np.where(copied, s.release, s.last + 1), copied=copied)


def _free_views(graph: Graph) -> Graph:
    """Return the graph with views of zero duration, since schedules do not remake views at copies back."""
    views = np.flatnonzero(graph.base != np.arange(len(graph.size)))
    free = np.isin(np.arange(len(graph)), graph.producer[views])
    return graph.with_columns(
        seconds=np.where(free, 0, graph.seconds), workspace=np.where(free, 0, graph.workspace)
    )


@given(st.data(), graphs().map(_free_views), links())
def test_simulation_agrees_with_the_replay_of_schedules(data, graph, link):
    plan = graph_step(graph, offloadable(graph), outside=5)
    schedule = _dropped_later(data.draw(schedules(plan.step)))
    # Copies requested at one operation are ordered by names there, and by rows here.
    outs, ins = schedule.out[schedule.copied], schedule.fetch
    if len(set(outs.tolist())) < len(outs) or len(set(ins.tolist())) < len(ins):
        schedule = schedule.select(schedule.buffer == (schedule.buffer[:1].sum() if len(schedule) else 0))
    made = apply_rewriting(graph, Rewriting(plan.offloads(schedule)))
    timed, replayed = simulate(made, link, outside_bytes=5), replay(plan.step, link, schedule)
    original = made.role == 0
    assert timed.load[original].tolist() == replayed.load.tolist()
    assert timed.peak_bytes == replayed.peak_bytes
    assert timed.seconds == pytest.approx(replayed.iteration_seconds, abs=1e-9)
    assert timed.moved_bytes == replayed.moved_bytes
    assert timed.returned_bytes == replayed.returned_bytes


def _gaps(seeds: range) -> list[float]:
    gaps = []
    for seed in seeds:
        graph, link, limit = limited_net(seed)
        solved = least_seconds(graph, link, limit)
        assert solved is not None  # a limit is refused exactly if infeasible
        judged = simulate(apply_rewriting(graph, solved[0]), link)
        assert judged.peak_bytes <= limit
        # A copy that waits only for its queue may be later than proven by rounding to whole ticks.
        assert judged.seconds > solved[1] - 0.02
        gaps.append(Decider(graph, link).decide(limit).seconds / solved[1] - 1)
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
        least, _ = Decider(graph, link).least()
        assert least_seconds(graph, link, least - 1) is None


def test_oracle_claims_no_proof_of_an_unproven_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that stays unproven could belong to the shortest step, so that the others prove nothing."""
    graph, link, limit = limited_net(0)
    assert least_seconds(graph, link, limit) is not None
    short = partial(offload_oracle.least_stall, seconds=0.0)
    monkeypatch.setattr("rewriting_models.least_stall", short)
    with pytest.raises(offload_oracle.UnprovenError):
        least_seconds(graph, link, limit)
