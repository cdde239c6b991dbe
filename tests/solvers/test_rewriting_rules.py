"""Published rules against their definitions, on random graphs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rewriting_graphs import chain, graph_of, graphs, ruled
from rewriting_play import reaches
from rewriting_terms import contents_by_running

from solvers.rewriting import Graph, Sync, erase, rewrite
from solvers.rewriting.levels import levels_of, serialised
from solvers.rewriting.rules import Rules, candidates, copies, matching, published, swappable


@settings(max_examples=60)
@given(ruled())
def test_rewritings_by_the_rules_keep_contents_and_can_be_erased(case: tuple[Graph, Rules]) -> None:
    graph, rules = case
    new = rewrite(graph, published(graph, levels_of(graph), rules))
    was, now = contents_by_running(graph), contents_by_running(new)
    assert [now[v] for v in range(len(now))] == [was[c] for c in new.content.tolist()]
    assert erase(new).same_as(graph)


@settings(max_examples=60)
@given(ruled())
def test_edge_is_cut_exactly_if_long_and_its_value_leaves_once(case: tuple[Graph, Rules]) -> None:
    graph, rules = case
    levels = levels_of(graph)
    decided = published(graph, levels, rules)
    cut = {(swap.value, op) for swap in decided.swaps for back in swap.ins for op in back.consumers}
    assert len({swap.value for swap in decided.swaps}) == len(decided.swaps)
    allowed = swappable(graph)
    for op in range(len(graph)):
        for memory in set(graph.base[graph.read_by(op)].tolist()):
            reads = [v for v in graph.read_by(op).tolist() if graph.base[v] == memory]
            makers = graph.producer[reads]
            far = max(int(levels.level[op] - (levels.level[p] if p >= 0 else 0)) for p in makers)
            if (memory, op) in cut:
                assert allowed[memory]
                assert far > rules.threshold
            elif allowed[memory] and graph.repeatable[makers].all():
                views = [v for v in reads if v != memory]
                made_of = [graph.read_by(int(graph.producer[v])).tolist() for v in views]
                deeper = any({memory} != {u for u in of if graph.base[u] == memory} for of in made_of)
                assert far <= rules.threshold or deeper


@settings(max_examples=60)
@given(ruled())
def test_neighbours_share_a_copy(case: tuple[Graph, Rules]) -> None:
    graph, rules = case
    levels = levels_of(graph)
    for swap in published(graph, levels, rules).swaps:
        groups = [sorted(int(levels.level[op]) for op in back.consumers) for back in swap.ins]
        assert rules.groupby > 0 or all(len(group) == 1 for group in groups)
        for group in groups:
            assert (np.diff(group) <= rules.groupby).all()
        for earlier, later in pairwise(groups):
            assert later[0] - earlier[-1] > rules.groupby or rules.groupby == 0


@settings(max_examples=60)
@given(ruled())
def test_trigger_reaches_the_reader_and_stands_above_the_producer(case: tuple[Graph, Rules]) -> None:
    graph, rules = case
    levels = levels_of(graph)
    level = levels.level
    backs = [(swap.value, back) for swap in published(graph, levels, rules).swaps for back in swap.ins]
    for value, back in backs:
        first = min(back.consumers, key=lambda op: (level[op], op))
        if back.trigger < 0:
            continue
        assert back.trigger in reaches(graph, first) - {first}
        assert level[back.trigger] > level[graph.producer[value]]
        if rules.ahead is not None:
            assert level[back.trigger] == level[first] - rules.ahead - 1


def test_sequential_copies_begin_where_the_former_copy_is_read() -> None:
    graph = chain(6)
    levels = levels_of(graph)
    ins = sorted(
        (int(levels.level[back.consumers[0]]), int(levels.level[back.trigger]) if back.trigger >= 0 else -1)
        for swap in published(graph, levels, Rules(1, None)).swaps
        for back in swap.ins
    )
    assert [trigger for _, trigger in ins[1:]] == [reader for reader, _ in ins[:-1]]


@settings(max_examples=60)
@given(graphs(), st.integers(0, 10))
def test_decisions_about_a_serialised_graph_hold_for_the_graph(graph: Graph, most: int) -> None:
    new = serialised(graph, levels_of(graph), most)
    decided = published(new, levels_of(new), Rules(1, 1, 0))
    assert erase(rewrite(graph, decided)).same_as(graph)
    assert erase(rewrite(new, decided)).same_as(new)


@settings(max_examples=60)
@given(graphs(), st.sampled_from(["aten.mm", "encoder", "encoder.?", "head*", "*"]))
def test_excluded_operations_are_neither_end_of_a_swap(graph: Graph, pattern: str) -> None:
    levels = levels_of(graph)
    hit = matching(graph, [pattern])
    for edges, allowed in (
        (candidates(graph, levels, exclude=[pattern]), ~hit),
        (candidates(graph, levels, include=[pattern]), hit),
    ):
        for swap in published(graph, levels, Rules(0), edges).swaps:
            assert allowed[graph.producer[swap.value]]
            assert all(allowed[op] for back in swap.ins for op in back.consumers)


def test_name_filters_match_operators_and_modules_with_their_submodules() -> None:
    graph = chain(2).with_columns(modules=("a", "a.b", "ab"), module=[0, 1, 2, -1])
    assert matching(graph, ["a"]).tolist() == [True, True, False, False]
    assert matching(graph, ["a?"]).tolist() == [False, False, True, False]
    assert matching(graph, ["op"]).all()
    assert not matching(graph, []).any()


@settings(max_examples=40)
@given(graphs(), st.integers(0, 3))
def test_limit_on_swapped_values_takes_the_values_made_first(graph: Graph, most: int) -> None:
    levels = levels_of(graph)

    def leave(rules: Rules) -> list[int]:
        return [swap.value for swap in published(graph, levels, rules).swaps]

    everything = sorted(leave(Rules(0)), key=lambda v: (levels.level[graph.producer[v]], v))
    assert sorted(leave(Rules(0, most=most))) == sorted(everything[:most])


def test_no_graph_no_copies() -> None:
    graph = chain(1).with_columns(rank=[-1, -1, -1])
    levels = levels_of(graph)
    assert len(copies(graph, levels, candidates(graph, levels), Rules(0)).first) == 0


def test_readers_of_a_level_have_separate_copies_without_sharing() -> None:
    reads = [[0], [1], [2], [1, 3], [1, 3]]
    graph = graph_of(size=[1] * 6, producer=[-1, 0, 1, 2, 3, 4], reads=reads)
    levels = levels_of(graph)
    (swap,) = published(graph, levels, Rules(1, 0, 0)).swaps
    assert [back.consumers for back in swap.ins] == [(3,), (4,)]
    (swap,) = published(graph, levels, Rules(1, 0, 1)).swaps
    assert [back.consumers for back in swap.ins] == [(3, 4)]


def test_reader_through_an_unrepeatable_view_is_not_cut() -> None:
    reads = [[0], [1], [2], [2, 3], [1, 4]]
    again = np.array([True, False, True, True, True])
    graph = graph_of(
        size=[1, 1, 0, 1, 1, 1], producer=[-1, 0, 1, 2, 3, 4], base=[0, 1, 1, 3, 4, 5], reads=reads,
                     repeatable=again)  # fmt: skip
    cut = {op for swap in published(graph, levels_of(graph), Rules(0)).swaps if swap.value == 1
           for back in swap.ins for op in back.consumers}  # fmt: skip
    assert 4 in cut
    assert 3 not in cut


def _sequential(reads: list[list[int]], size: int) -> list[tuple[int, int]]:
    """Return readers of copies and triggers of the sequential strategy; operation i makes value i + 1."""
    graph = graph_of(size=[1] * size, producer=[-1, *range(size - 1)], reads=reads)
    levels = levels_of(graph)
    return sorted(
        (back.consumers[0], back.trigger)
        for swap in published(graph, levels, Rules(3, None)).swaps
        for back in swap.ins
    )


def test_first_sequential_copy_begins_three_levels_ahead() -> None:
    reads = [[0], [1], [2], [3], [4], [5], [6], [1, 7]]
    assert _sequential(reads, 9) == [(7, 4)]


def test_sequential_copies_for_a_level_begin_a_level_earlier() -> None:
    reads = [[0], [1], [2], [3], [4], [5], [6], [1, 7], [2, 7]]
    assert _sequential(reads, 10) == [(7, 4), (8, 6)]


def test_value_in_host_memory_is_no_candidate() -> None:
    graph = chain(4)
    host = np.arange(9) == 2
    assert set(np.flatnonzero(swappable(graph) & ~swappable(graph.with_columns(host=host)))) == {2}


def test_sync_mode_is_part_of_the_decisions() -> None:
    graph = chain(4)
    assert [published(graph, levels_of(graph), Rules(sync=mode)).sync for mode in Sync] == list(Sync)


def test_values_made_first_have_the_lowest_levels() -> None:
    """Numbers do not matter: here a branch has higher numbers than the operations it could run beside."""
    reads = [[0], [1], [2], [0], [3, 4], [5], [6], [7, 4, 3]]
    graph = graph_of(size=[1] * 9, producer=[-1, *range(8)], reads=reads)
    levels = levels_of(graph)
    everything = {swap.value for swap in published(graph, levels, Rules(1)).swaps}
    assert everything == {3, 4}
    assert [swap.value for swap in published(graph, levels, Rules(1, most=1)).swaps] == [4]
