"""Refinement of decisions: shared reloads, of which no kernel reads two, and earlier offloads."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rewriting_graphs import chain, graph_of, graphs, reverted, rewritings
from rewriting_terms import contents_by_running

from solvers.rewriting import Graph, Offload, Reload, Rewriting, apply_rewriting
from solvers.rewriting.refinement import merge_shared_reloads, offload_early
from solvers.rewriting.runs import Runs
from solvers.swap import Link


@st.composite
def cases(draw: st.DrawFn) -> tuple[Graph, Rewriting, list[frozenset[int]]]:
    """Decisions about a graph, with kernels of neighbours or of any operations, and operations in none."""
    graph = draw(graphs())
    rewriting = draw(rewritings(graph))
    runs = Runs(graph, rewriting)
    order = sorted([*range(len(graph)), *(len(graph) + op for op in runs.before)], key=runs.place)
    cuts = sorted(draw(st.sets(st.integers(0, len(order)))))
    kernels = [frozenset(order[i:j]) for i, j in pairwise([0, *cuts, len(order)])]
    return graph, rewriting, [*kernels, *draw(st.lists(st.frozensets(st.sampled_from(order)), max_size=3))]


@settings(max_examples=40)
@given(cases())
def test_every_reader_sees_the_same_contents(case: tuple[Graph, Rewriting, list[frozenset[int]]]) -> None:
    graph, rewriting, together = case
    new = apply_rewriting(graph, merge_shared_reloads(graph, rewriting, together))
    was, now = contents_by_running(graph), contents_by_running(new)
    assert [now[v] for v in range(len(now))] == [was[c] for c in new.content.tolist()]
    assert reverted(new).same_as(graph)


@settings(max_examples=40)
@given(cases())
def test_each_kernel_reads_a_single_copy_and_others_are_unchanged(
    case: tuple[Graph, Rewriting, list[frozenset[int]]],
) -> None:
    graph, rewriting, together = case
    place = Runs(graph, rewriting).place
    made = merge_shared_reloads(graph, rewriting, together)
    assert merge_shared_reloads(graph, made, together) == made
    for old, new in zip(rewriting.offloads, made.offloads, strict=True):
        assert (old.value, old.after, old.release) == (new.value, new.after, new.release)
        for group in together:
            assert sum(not group.isdisjoint(reload.consumers) for reload in new.reloads) <= 1
        was = {run: i for i, reload in enumerate(old.reloads) for run in reload.consumers}
        for reload in new.reloads:
            parts = [old.reloads[i] for i in sorted({was[run] for run in reload.consumers})]
            assert sorted(reload.consumers) == sorted(run for part in parts for run in part.consumers)
            first = min(reload.consumers, key=place)
            assert reload.trigger == next(one.trigger for one in parts if first in one.consumers)
            linked = {i: {i} for i in range(len(parts))}  # by kernels alone
            for group in together:
                hit = [i for i, part in enumerate(parts) if not group.isdisjoint(part.consumers)]
                joined = set().union(*(linked[i] for i in hit))
                linked.update(dict.fromkeys(joined, joined))
            assert len(linked[0]) == len(parts)


def _swapped(graph: Graph, value: int, after: int, release: int) -> Offload:
    readers = tuple(run for run in graph.readers_of(value).tolist() if graph.backward[run])
    return Offload(value, (Reload(readers),), after, release)


def test_copy_out_begins_while_its_value_is_still_read():
    graph = graph_of(
        [0, 8, 1, 1, 1, 1],
        [-1, 0, 1, 2, 3, 4],
        [[0], [1], [1, 2], [3], [4, 1]],
        backward=[False] * 3 + [True] * 2,
    )
    late = Rewriting((_swapped(graph, 1, 2, 3),))
    soon = offload_early(graph, late, Link(0.0, 0.25, 0.0, 0.0))
    assert [offload.after for offload in soon.offloads] == [0]
    assert [offload.release for offload in soon.offloads] == [3]


def test_copy_out_delayed_by_another_begins_no_later_than_before():
    graph = chain(8, size=1)
    graph = graph.with_columns(size=np.where(np.arange(len(graph.size)) == 1, 100, 1))
    late = Rewriting((_swapped(graph, 1, 4, 6), _swapped(graph, 2, 2, 3)))
    soon = offload_early(graph, late, Link(0.0, 1.0, 0.0, 0.0))
    assert all(new.after <= old.after for new, old in zip(soon.offloads, late.offloads, strict=True))
    apply_rewriting(graph, soon)
