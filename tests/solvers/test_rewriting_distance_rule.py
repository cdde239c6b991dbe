"""Offload by distance: levels and decisions against their definitions, on random graphs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rewriting_graphs import chain, graph_of, graphs, reverted
from rewriting_terms import contents_by_running

from solvers.rewriting import Graph, apply_rewriting
from solvers.rewriting.distance_rule import levels_of, matching_operations, offload_beyond

THRESHOLDS = st.integers(0, 3)


def levels_by_definition(graph: Graph) -> list[int]:
    """Return the levels by definition: an operation with all inputs on earlier levels is on the next."""
    needs: list[set[int]] = [set(graph.producer[graph.read_by(op)].tolist()) for op in range(len(graph))]
    for earlier, later in graph.control.tolist():
        needs[later].add(earlier)
    levels, done, depth = [-1] * len(graph), set[int](), 0
    while -1 in levels:
        if depth > 0:
            done.add(-1)
        ready = [op for op in range(len(graph)) if op not in done and needs[op] <= done]
        for op in ready:
            levels[op] = depth
        done.update(ready)
        depth += 1
    return levels


def predecessors(graph: Graph, later: int) -> set[int]:
    """Return the operations with a path to an operation, itself among them."""
    found = {later}
    for op in range(later, -1, -1):
        if op in found:
            found |= {int(p) for p in graph.producer[graph.read_by(op)] if p >= 0}
            found |= {int(a) for a, b in graph.control if b == op}
    return found


@settings(max_examples=60)
@given(graphs())
def test_levels_equal_their_definition(graph: Graph) -> None:
    levels = levels_of(graph)
    assert levels.level.tolist() == levels_by_definition(graph)
    for op in np.flatnonzero(levels.longest >= 0).tolist():
        before = int(levels.longest[op])
        assert levels.level[before] == levels.level[op] - 1
        assert before in predecessors(graph, op)


@settings(max_examples=60)
@given(graphs(), THRESHOLDS)
def test_offloads_by_distance_keep_contents(graph: Graph, threshold: int) -> None:
    new = apply_rewriting(graph, offload_beyond(graph, threshold))
    original, rewritten = contents_by_running(graph), contents_by_running(new)
    assert rewritten == [original[content] for content in new.content.tolist()]
    assert reverted(new).same_as(graph)


@settings(max_examples=60)
@given(graphs(), THRESHOLDS)
def test_distant_readers_of_movable_values_alone_read_reloads(graph: Graph, threshold: int) -> None:
    level, decided = levels_of(graph).level, offload_beyond(graph, threshold)
    reloaded = {(o.value, op) for o in decided.offloads for reload in o.reloads for op in reload.consumers}
    assert len({offload.value for offload in decided.offloads}) == len(decided.offloads)
    own = graph.base == np.arange(len(graph.base))
    lasting = np.isin(graph.base, graph.base[graph.lasting])
    allowed = own & graph.movable & ~lasting & ~graph.host & (graph.rank >= 2) & (graph.producer >= 0)
    for op in range(len(graph)):
        for memory in set(graph.base[graph.read_by(op)].tolist()):
            reads = [v for v in graph.read_by(op).tolist() if graph.base[v] == memory]
            makers = graph.producer[reads]
            distance = max(int(level[op] - (level[p] if p >= 0 else 0)) for p in makers)
            if (memory, op) in reloaded:
                assert allowed[memory]
                assert distance > threshold
            elif allowed[memory] and graph.repeatable[makers].all():
                sources = [graph.read_by(int(graph.producer[v])).tolist() for v in reads if v != memory]
                deeper = any({memory} != {u for u in of if graph.base[u] == memory} for of in sources)
                assert distance <= threshold or deeper


@settings(max_examples=60)
@given(graphs(most_ops=20), THRESHOLDS)
def test_near_readers_share_a_reload_beginning_two_levels_before(graph: Graph, threshold: int) -> None:
    level = levels_of(graph).level
    for offload in offload_beyond(graph, threshold).offloads:
        groups = [sorted(int(level[op]) for op in reload.consumers) for reload in offload.reloads]
        assert all((np.diff(group) <= 5).all() for group in groups)
        assert all(later[0] - earlier[-1] > 5 for earlier, later in pairwise(groups))
        for reload in offload.reloads:
            first = min(reload.consumers, key=lambda op: (level[op], op))
            if reload.trigger >= 0:
                assert reload.trigger in predecessors(graph, first) - {first}
                assert level[graph.producer[offload.value]] < level[reload.trigger] == level[first] - 2


def test_reader_through_an_unrepeatable_view_reads_the_value_itself() -> None:
    graph = graph_of(
        size=[1, 1, 0, 1, 1, 1],
        producer=[-1, 0, 1, 2, 3, 4],
        base=[0, 1, 1, 3, 4, 5],
        reads=[[0], [1], [2], [2, 3], [1, 4]],
        repeatable=np.array([True, False, True, True, True]),
    )
    (offload,) = (offload for offload in offload_beyond(graph, 0).offloads if offload.value == 1)
    readers = {op for reload in offload.reloads for op in reload.consumers}
    assert 4 in readers
    assert 3 not in readers


def test_name_filters_match_operators_and_modules_with_their_submodules() -> None:
    graph = chain(2).with_columns(modules=("a", "a.b", "ab"), module=[0, 1, 2, -1])
    assert matching_operations(graph, ["a"]).tolist() == [True, True, False, False]
    assert matching_operations(graph, ["a?"]).tolist() == [False, False, True, False]
    assert matching_operations(graph, ["op"]).all()
    assert not matching_operations(graph, []).any()
