"""Rewritten graphs: offloads, reloads and recomputations keep every reader's contents."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rewriting_graphs import chain, graph_of, graphs, reverted, rewritings, same_graph
from rewriting_models import contents_by_running

from solvers.errors import PlanError
from solvers.rewriting import Graph, Offload, Reload, Rewriting, Role, apply_rewriting
from solvers.rewriting.pass_boundary import split_by_pass
from solvers.rewriting.refinement import merge_shared_reloads, offload_early
from solvers.rewriting.runs import Runs
from solvers.swap import Link


def test_readers_are_the_reads_turned_round() -> None:
    graph = chain(5)
    pairs = {(int(v), int(op)) for op in range(len(graph)) for v in graph.read_by(op)}
    assert pairs == {(v, int(op)) for v in range(len(graph.size)) for op in graph.readers_of(v)}


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"seconds": [0.0]}, "lengths"),
        ({"seconds": [np.nan] * 8}, "times"),
        ({"size": [-1] * 9}, "negative"),
        ({"reads": [9] * 11}, "does not have"),
        ({"producer": [8] * 9}, "no operation"),
        ({"reads_start": [1] * 9}, "divided"),
        ({"control": [[3, 2]]}, "control"),
        ({"control": [[3, 9]]}, "order of no"),
        ({"names": ("a",) * 8}, "two operations"),
        ({"base": [1, 2, 2, 3, 4, 5, 6, 7, 8]}, "view of a view"),
        ({"content": [1, 2, 2, 3, 4, 5, 6, 7, 8]}, "copy of a copy"),
    ],
)
def test_contradictory_columns_are_refused(columns: dict[str, object], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        chain(4).with_columns(**columns)


def test_value_read_before_its_producer_is_refused() -> None:
    graph = chain(4)
    late = graph.producer.copy()
    late[1] = 7
    with pytest.raises(PlanError, match="before it is made"):
        graph.with_columns(producer=late)


@st.composite
def decided(draw: st.DrawFn) -> tuple[Graph, Rewriting]:
    graph = draw(graphs())
    return graph, draw(rewritings(graph))


@settings(max_examples=50)
@given(decided())
def test_every_reader_sees_the_same_contents(case: tuple[Graph, Rewriting]) -> None:
    graph, rewriting = case
    new = apply_rewriting(graph, rewriting)
    was, now = contents_by_running(graph), contents_by_running(new)
    assert [now[v] for v in range(len(was))] == was
    assert [now[v] for v in range(len(now))] == [was[c] for c in new.content.tolist()]


@settings(max_examples=50)
@given(decided())
def test_reverting_gives_the_graph_back(case: tuple[Graph, Rewriting]) -> None:
    graph, rewriting = case
    assert same_graph(reverted(apply_rewriting(graph, rewriting)), graph)


@settings(max_examples=50)
@given(decided())
def test_views_have_the_memory_of_a_value_read_by_their_operation(case: tuple[Graph, Rewriting]) -> None:
    new = apply_rewriting(*case)
    for view in np.flatnonzero(new.base != np.arange(len(new.base))).tolist():
        assert new.base[view] in new.base[new.read_by(int(new.producer[view]))]
        assert new.content[new.base[view]] == case[0].base[new.content[view]]


@settings(max_examples=50)
@given(decided())
def test_each_offload_has_a_copy_out_and_all_reloads(case: tuple[Graph, Rewriting]) -> None:
    graph, rewriting = case
    new = apply_rewriting(graph, rewriting)
    outs = np.flatnonzero(new.role == Role.OFFLOAD)
    assert sorted(new.reads[new.reads_start[outs]]) == sorted(offload.value for offload in rewriting.offloads)
    assert int((new.role == Role.RELOAD).sum()) == sum(len(offload.reloads) for offload in rewriting.offloads)
    assert set(np.flatnonzero(new.host)) == {v for v, p in enumerate(new.producer) if p in outs}
    assert (new.role[new.reader[new.host[new.reads]]] == Role.RELOAD).all()


@settings(max_examples=50)
@given(decided())
def test_consumers_read_their_reload_and_others_the_original(case: tuple[Graph, Rewriting]) -> None:
    graph, rewriting = case
    new = apply_rewriting(graph, rewriting)
    where = {name: op for op, name in enumerate(new.names)}
    for offload in rewriting.offloads:
        back = {
            run: f"reload.{offload.value}.{i}"
            for i, one in enumerate(offload.reloads)
            for run in one.consumers
        }
        for run in range(len(graph)):
            old, row = graph.read_by(run), new.read_by(where[graph.names[run]])
            for value in row[graph.base[old] == offload.value].tolist():
                maker = int(new.producer[new.base[value]])
                if run in back:
                    assert new.names[maker] == back[run]


@settings(max_examples=50)
@given(decided())
def test_recomputed_values_are_not_kept_for_the_backward_pass(case: tuple[Graph, Rewriting]) -> None:
    graph, rewriting = case
    new = apply_rewriting(graph, rewriting)
    values = np.flatnonzero(
        np.isin(graph.base, rewriting.recomputed) | np.isin(np.arange(len(graph.size)), rewriting.recomputed)
    )
    values = values[~graph.backward[graph.producer[values]]]
    readers = new.reader[np.isin(new.reads, values)]
    # A recomputed view of a reloaded memory reads other memories unchanged.
    assert not [op for op in readers if new.backward[op] and not new.names[op].startswith("reload.")]


@settings(max_examples=50)
@given(decided())
def test_triggers_and_releases_are_control_edges(case: tuple[Graph, Rewriting]) -> None:
    graph, rewriting = case
    new = apply_rewriting(graph, rewriting)
    where = {name: op for op, name in enumerate(new.names)}
    n = len(graph)

    def row(run: int) -> int:
        return where[graph.names[run]] if run < n else where[f"recompute.{graph.names[run - n]}"]

    pairs = {(int(a), int(b)) for a, b in new.control}
    for offload in rewriting.offloads:
        out = where[f"offload.{offload.value}"]
        assert offload.release < 0 or (out, row(offload.release)) in pairs
        for i, reload in enumerate(offload.reloads):
            assert reload.trigger < 0 or (row(reload.trigger), where[f"reload.{offload.value}.{i}"]) in pairs


def test_view_of_an_unrepeatable_operation_keeps_its_memory() -> None:
    graph = graph_of(
        size=[4, 4, 0, 4], producer=[-1, 0, 1, 2], base=[0, 1, 1, 3], reads=[[0], [1], [2]],
        backward=[False, False, True], repeatable=[True, False, True],
    )  # fmt: skip
    with pytest.raises(PlanError, match="op1 cannot run again"):
        apply_rewriting(graph, Rewriting((Offload(1, (Reload((2,)),)),)))


def _bad(**columns: object) -> Graph:
    graph: Graph = chain(4).with_columns(**columns)
    return graph


@pytest.mark.parametrize(
    ("graph", "rewriting", "what"),
    [
        (_bad(movable=[False] * 9), Rewriting((Offload(1, ()),)), "not to be moved"),
        (_bad(lasting=[True] * 9), Rewriting((Offload(1, ()),)), "after the step"),
        (_bad(host=[True] * 9), Rewriting((Offload(1, ()),)), "host"),
        (_bad(size=[0] * 9, base=[0, 1, 1, *range(3, 9)]), Rewriting((Offload(2, ()),)), "view"),
        (chain(4), Rewriting((Offload(9, ()),)), "no value 9"),
        (chain(4), Rewriting((Offload(1, ()), Offload(1, ()))), "twice"),
        (chain(4), Rewriting((Offload(1, (Reload((6,)), Reload((6,)))),)), "two copies"),
        (chain(4), Rewriting((Offload(1, (Reload(()),)),)), "nobody reads"),
        (chain(4), Rewriting((Offload(1, (Reload((5,)),)),)), "does not read"),
        (chain(4), Rewriting((Offload(1, (Reload((99,)),)),)), "run 99"),
        (chain(4), Rewriting((Offload(1, (Reload((6,), trigger=6),)),)), "returns before"),
        (chain(4), Rewriting((Offload(2, (Reload((5,), trigger=0),)),)), "returns before"),
        (chain(4), Rewriting((Offload(2, (Reload((5,)),), after=0),)), "before it is made"),
        (chain(4), Rewriting((Offload(1, (Reload((6,)),), after=3, release=3),)), "given back before"),
        (chain(4), Rewriting((Offload(1, ()),), recomputed=(1,)), "recomputed"),
        (chain(4), Rewriting(recomputed=(0,)), "input"),
        (chain(4), Rewriting(recomputed=(9,)), "no value 9"),
        (chain(4), Rewriting(recomputed=(5,)), "backward"),
        (_bad(repeatable=[False] * 8), Rewriting(recomputed=(1,)), "op0 cannot run again"),
        (_bad(control=[[0, 1]]), Rewriting(recomputed=(1,)), "op0 must run before op1"),
    ],
)  # fmt: skip
def test_impossible_rewritings_are_refused(graph: Graph, rewriting: Rewriting, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        apply_rewriting(graph, rewriting)


def test_rewritten_graph_is_refused() -> None:
    new = apply_rewriting(chain(4), Rewriting((Offload(1, (Reload((6,)),)),)))
    with pytest.raises(PlanError, match="rewritten again"):
        apply_rewriting(new, Rewriting(recomputed=(2,)))


@settings(max_examples=50)
@given(decided())
def test_only_offloaded_values_span_both_passes_after_division_by_pass(case: tuple[Graph, Rewriting]) -> None:
    """The swapped values stay the same, and a second division changes nothing."""
    graph, rewriting = case
    assume(not (np.diff(graph.backward.astype(int)) < 0).any())
    divided = split_by_pass(graph, rewriting)
    assert split_by_pass(graph, divided) == divided
    new = apply_rewriting(graph, divided)
    assert (np.diff(new.backward.astype(int)) >= 0).all() or not rewriting.offloads
    assert {s.value for s in divided.offloads} == {s.value for s in rewriting.offloads}
    for offload, was in zip(divided.offloads, rewriting.offloads, strict=True):
        readers = [run for reload in offload.reloads for run in reload.consumers]
        assert sorted(readers) == sorted(run for reload in was.reloads for run in reload.consumers)


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
def test_refined_rewritings_keep_contents(case: tuple[Graph, Rewriting, list[frozenset[int]]]) -> None:
    graph, rewriting, together = case
    new = apply_rewriting(graph, merge_shared_reloads(graph, rewriting, together))
    was, now = contents_by_running(graph), contents_by_running(new)
    assert [now[v] for v in range(len(now))] == [was[c] for c in new.content.tolist()]
    assert same_graph(reverted(new), graph)


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
