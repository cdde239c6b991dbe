"""A pause between the passes: what is decided with it holds without, and what is there then is told."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rewriting_graphs import chain, graphs, rewritings
from swap_steps import links

from solvers.rewriting import Rewriting, Swap, SwapIn, erase, rewrite
from solvers.rewriting.choose import Chooser
from solvers.rewriting.passes import by_pass
from solvers.rewriting.pauses import PAUSE, between, paused, unpaused
from solvers.rewriting.timed import simulate


@settings(max_examples=25)
@given(graphs(most_ops=20), links(), st.integers(0, 100))
def test_decisions_with_a_pause_hold_without_it(graph, link, more):
    """The same bytes during every other operation, none of them put elsewhere."""
    assume(graph.backward.any())
    with_pause = paused(graph, more)
    chooser = Chooser(with_pause, link)
    made = chooser.decide(chooser.least()[0]).rewriting
    without = rewrite(graph, unpaused(graph, made))
    assert erase(without).same_as(graph)
    wanted, got = (simulate(one, link) for one in (rewrite(with_pause, made), without))
    assert got.peak_bytes <= wanted.peak_bytes


@given(st.data())
def test_a_pause_changes_nothing_else(data):
    graph = data.draw(graphs(most_ops=20))
    assume(graph.backward.any() and not graph.backward[0])
    at, with_pause = int(graph.backward.argmax()), paused(graph, 7)
    assert with_pause.names[at] == PAUSE
    assert not len(with_pause.read_by(at))
    assert not (with_pause.producer == at).any()
    link = data.draw(links())
    one, other = simulate(graph, link), simulate(with_pause, link)
    np.testing.assert_array_equal(np.delete(other.load, at), one.load)
    assert other.seconds == one.seconds


@given(st.data())
def test_between_the_passes_is_what_the_second_reads_of_the_first(data):
    graph = data.draw(graphs(most_ops=20))
    assume(graph.backward.any() and not graph.backward[0])
    made = rewrite(graph, by_pass(graph, data.draw(rewritings(graph))))
    turn, there = int(made.backward.argmax()), set[int]()
    for value in range(len(made.size)):
        late = made.lasting[value] or (made.readers_of(value) >= turn).any()
        if late and not made.host[value] and (made.producer[made.base == made.base[value]] < turn).any():
            there.add(int(made.base[value]))
    assert between(made) == sum(int(made.size[base]) for base in there)


def test_what_is_there_between_the_passes():
    """Of a chain the batch and what four layers made; not what leaves or is made again."""
    graph = chain(5, size=10)
    assert between(graph) == 50
    swaps = tuple(Swap(value, (SwapIn((9 - value,)),)) for value in (2, 3))
    assert between(rewrite(graph, by_pass(graph, Rewriting(swaps)))) == 30
    assert between(rewrite(graph, by_pass(graph, Rewriting(swaps, recomputed=(1,))))) == 20
