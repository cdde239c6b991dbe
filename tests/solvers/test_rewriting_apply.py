"""Rewritten graphs compute the same as the original, and are the original once the insertions are erased."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rewriting_graphs import chain, graph_of, graphs, reverted, rewritings
from rewriting_terms import contents_by_running

from solvers.errors import PlanError
from solvers.rewriting import Graph, Offload, Reload, Rewriting, Role, apply_rewriting
from solvers.rewriting.pass_boundary import split_by_pass


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
    assert reverted(apply_rewriting(graph, rewriting)).same_as(graph)


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
    # A view of what came back, made again of several memories, reads the others as they are.
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
