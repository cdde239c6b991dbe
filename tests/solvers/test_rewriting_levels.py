"""Categorised topological ordering against the definition, and the effect of serialising a level."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rewriting_graphs import chain, graph_of, graphs

from solvers.rewriting.levels import distances, levels_of, serialised

if TYPE_CHECKING:
    from solvers.rewriting import Graph


def _by_definition(graph: Graph) -> list[int]:
    """Return the sets by definition: an operation with all inputs in earlier sets is in the next set."""
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


@settings(max_examples=60)
@given(graphs())
def test_levels_equal_their_definition(graph: Graph) -> None:
    levels = levels_of(graph)
    assert levels.level.tolist() == _by_definition(graph)
    assert [sorted({int(levels.level[op]) for op in one}) for one in levels.sets()] == [
        [i] if len(one) else [] for i, one in enumerate(levels.sets())
    ]
    assert sorted(np.concatenate(levels.sets()).tolist()) == list(range(len(graph)))


@settings(max_examples=60)
@given(graphs(), st.data())
def test_longest_path_has_an_operation_of_every_level(graph: Graph, data: st.DataObject) -> None:
    levels = levels_of(graph)
    op = data.draw(st.integers(0, len(graph) - 1))
    reach = {op}
    edges = {(int(graph.producer[v]), r) for r in range(len(graph)) for v in graph.read_by(r)}
    edges |= {(int(a), int(b)) for a, b in graph.control}
    for later in range(op, -1, -1):
        reach |= {a for a, b in edges if b == later and later in reach}
    for level in range(int(levels.level[op])):
        before = int(levels.before(np.array([op]), np.array([level]))[0])
        candidates = {c for c in reach if c >= 0 and levels.level[c] == level}
        assert before in candidates or (before == -1 and level == 0)  # where an input begins the path


@settings(max_examples=60)
@given(graphs())
def test_edges_go_to_higher_levels(graph: Graph) -> None:
    levels = levels_of(graph)
    assert (distances(graph, levels) > 0).all()
    assert (levels.level[graph.control[:, 1]] > levels.level[graph.control[:, 0]]).all()


@settings(max_examples=60)
@given(graphs(), st.integers(0, 12))
def test_serialised_level_runs_in_sequence(graph: Graph, most: int) -> None:
    before = levels_of(graph)
    new = serialised(graph, before, most)
    after = levels_of(new)
    assert new.with_columns(control=graph.control).same_as(graph)
    made = [sum(int(graph.size[v]) for v in np.flatnonzero(graph.producer == op)) for op in range(len(graph))]
    for ops in before.sets():
        alone = len(set(after.level[ops].tolist())) == len(ops)
        assert alone or sum(made[op] for op in ops) <= most
    unchanged = all(sum(made[op] for op in ops) <= most for ops in before.sets())
    assert not unchanged or new.same_as(graph)


def test_distances_of_a_chain_grow_with_the_depth() -> None:
    graph = chain(4)
    levels = levels_of(graph)
    assert levels.level.tolist() == [1, 2, 3, 4, 4, 5, 6, 7]
    assert distances(graph, levels)[[4, 5, 7, 9]].tolist() == [1, 3, 5, 7]


def test_operation_without_inputs_is_at_level_0() -> None:
    graph = graph_of(size=[1, 1, 1], producer=[0, 1, 2], reads=[[], [], [0]], control=[[1, 2]])
    assert levels_of(graph).level.tolist() == [0, 0, 1]
