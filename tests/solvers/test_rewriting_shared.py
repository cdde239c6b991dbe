"""Shared copies: no kernel reads two copies of a swapped value, and nothing else changes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from rewriting_graphs import graph_of, graphs, rewritings
from rewriting_terms import contents_by_running

from solvers.rewriting import Graph, Rewriting, Swap, SwapIn, erase, rewrite
from solvers.rewriting.runs import Runs
from solvers.rewriting.shared_reloads import shared


@st.composite
def cases(draw: st.DrawFn) -> tuple[Graph, Rewriting, list[frozenset[int]]]:
    """Decisions about a graph, with kernels of neighbours or of any operations.

    Some operations are in no kernel.
    """
    graph = draw(graphs())
    rewriting = draw(rewritings(graph))
    runs = Runs(graph, rewriting)
    order = sorted([*range(len(graph)), *(len(graph) + op for op in runs.before)], key=runs.place)
    cuts = sorted(draw(st.sets(st.integers(0, len(order)))))
    kernels = [frozenset(order[i:j]) for i, j in pairwise([0, *cuts, len(order)])]
    return graph, rewriting, [*kernels, *draw(st.lists(st.frozensets(st.sampled_from(order)), max_size=3))]


@settings(max_examples=100)
@given(cases())
def test_every_reader_sees_the_same_contents(case: tuple[Graph, Rewriting, list[frozenset[int]]]) -> None:
    graph, rewriting, together = case
    new = rewrite(graph, shared(graph, rewriting, together))
    was, now = contents_by_running(graph), contents_by_running(new)
    assert [now[v] for v in range(len(now))] == [was[c] for c in new.content.tolist()]
    assert erase(new).same_as(graph)


@settings(max_examples=100)
@given(cases())
def test_each_kernel_reads_a_single_copy_and_others_are_unchanged(
    case: tuple[Graph, Rewriting, list[frozenset[int]]],
) -> None:
    graph, rewriting, together = case
    place = Runs(graph, rewriting).place
    made = shared(graph, rewriting, together)
    assert shared(graph, made, together) == made
    for old, new in zip(rewriting.swaps, made.swaps, strict=True):
        assert (old.value, old.after, old.release) == (new.value, new.after, new.release)
        for group in together:
            assert sum(not group.isdisjoint(back.consumers) for back in new.ins) <= 1
        was = {run: i for i, back in enumerate(old.ins) for run in back.consumers}
        for back in new.ins:
            parts = [old.ins[i] for i in sorted({was[run] for run in back.consumers})]
            assert sorted(back.consumers) == sorted(run for part in parts for run in part.consumers)
            first = min(back.consumers, key=place)
            assert back.trigger == next(one.trigger for one in parts if first in one.consumers)
            linked = {i: {i} for i in range(len(parts))}  # by kernels alone
            for group in together:
                hit = [i for i, part in enumerate(parts) if not group.isdisjoint(part.consumers)]
                joined = set().union(*(linked[i] for i in hit))
                linked.update(dict.fromkeys(joined, joined))
            assert len(linked[0]) == len(parts)


def test_two_copies_for_a_kernel_become_the_first() -> None:
    graph = graph_of([1, 8, 1, 1, 1], [-1, 0, 1, 2, 3], [[0], [1], [2, 1], [3, 1]])
    away = Rewriting((Swap(1, (SwapIn((2,), 1), SwapIn((3,), 2))),))
    assert shared(graph, away, [frozenset({1, 2}), frozenset({3})]) == away
    assert shared(graph, away, [frozenset({2, 3})]).swaps[0].ins == (SwapIn((2, 3), 1),)
