"""Pauses between the passes.

Decisions made for a pause hold without, and live bytes in the pause are reported.
"""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rewriting_graphs import chain, graph_of, graphs, reverted, rewritings
from swap_steps import links

from solvers.rewriting import apply_rewriting
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
from solvers.swap.link import Link


@settings(max_examples=10)
@given(graphs(most_ops=20), links(), st.integers(0, 100))
def test_decisions_with_a_pause_hold_without_the_pause(graph, link, more):
    """The same bytes during every other operation, and no other offset."""
    assume(graph.backward.any() and not graph.backward[0])
    with_pause = insert_pause(graph, Pause(more))
    chooser = Decider(with_pause, link)
    made = chooser.decide(chooser.least()[0]).rewriting
    without = apply_rewriting(graph, remove_pause(graph, made))
    assert reverted(without).same_as(graph)
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
