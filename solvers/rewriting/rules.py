"""Published rules that insert swaps into a graph (Le et al., ISMM 2019), as small functions of columns."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting.edges import Edges, edges_of
from solvers.rewriting.rewriting import Rewriting, Swap, SwapIn, Sync

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph
    from solvers.rewriting.levels import Levels

_FIRST_AHEAD = 3  # levels, of the first swap-in of the sequential strategy


@dataclass(frozen=True)
class Rules:
    """Settings of the published rules, all counted in levels.

    Attributes:
        threshold: edges longer than this are swapped.
        ahead: a swap-in may begin after an operation that is so many levels and one before the reader;
            `None`: the sequential strategy, each begins at the level of the preceding swap-in's reader.
        groupby: readers that are at most so many levels apart share a swap-in; 0: each has a separate one.
        sync: the extra waits.
        most: most values that are swapped, the earliest produced first (``n_tensors`` of the first version).
    """

    threshold: int = 1
    ahead: int | None = 1
    groupby: int = 0
    sync: Sync = Sync.NONE
    most: int | None = None


@dataclass(frozen=True, eq=False)
class Copies:
    """Swap-ins of some edges.

    Attributes:
        edge: int64[C], rows of `Edges` in order: the readers of copies.
        copy: int64[C], the copy of each reader, numbered from 0 in this order.
        first: int64[K], for each copy the row of the first reader by level.
        trigger: int64[K], for each copy the operation after which the copy may begin; -1 if none was found:
            then the copy waits for all other inputs of the first reader.
    """

    edge: NDArray[np.int64]
    copy: NDArray[np.int64]
    first: NDArray[np.int64]
    trigger: NDArray[np.int64]


def matching(graph: Graph, patterns: Sequence[str]) -> NDArray[np.bool_]:
    """Return a mask of operations whose kind, module or enclosing module matches a pattern (*, ?)."""

    def some(names: Sequence[str]) -> NDArray[np.bool_]:
        hit = [any(fnmatch.fnmatchcase(name, p) for p in patterns) for name in names]
        return np.array([*hit, False])  # the last entry is for index -1: unknown

    parts = [{".".join(m.split(".")[:i]) for i in range(1, m.count(".") + 2)} for m in graph.modules]
    known = {part for all_parts in parts for part in all_parts}
    within = {part for part, hit in zip(known, some(list(known)), strict=False) if hit}
    of_module = np.array([*(bool(all_parts & within) for all_parts in parts), False])
    hits: NDArray[np.bool_] = some(graph.kinds)[graph.kind] | of_module[graph.module]
    return hits


def swappable(graph: Graph) -> NDArray[np.bool_]:
    """Return a mask of the values that the published rules move, bool[M].

    Such a value is produced by an operation and has two dimensions or more.
    """
    alone = graph.base == np.arange(len(graph.base))
    lasts = np.isin(graph.base, graph.base[graph.lasting])
    may: NDArray[np.bool_] = alone & graph.movable & ~lasts & ~graph.host & (graph.rank >= 2)
    return may & (graph.producer >= 0)


def candidates(
    graph: Graph, levels: Levels, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Edges:
    """Return the edges, with those marked that the rules may cut.

    Both ends must match ``include``, if given, and neither may match ``exclude``.
    """
    ends = np.ones(len(graph), bool) if not include else matching(graph, include)
    ends &= ~matching(graph, exclude)
    edges = edges_of(graph, levels, swappable(graph))
    maker = graph.producer[edges.memory]
    both = ends[edges.reader] & (maker >= 0) & ends[maker] if len(graph) else edges.possible
    return Edges(**{**edges.__dict__, "possible": edges.possible & both})


def beyond(edges: Edges, threshold: int) -> NDArray[np.int64]:
    """Return the rows of the edges that are longer than a threshold and may be cut."""
    return np.flatnonzero(edges.possible & (edges.distance > threshold))


def fused(edges: Edges, chosen: NDArray[np.int64], groupby: int) -> NDArray[np.int64]:
    """Return the copy that each chosen edge reads: neighbouring readers of a memory share one.

    Neighbours are at most ``groupby`` levels apart; at 0 every edge has a separate copy.
    """
    memory, level = edges.memory[chosen], edges.level[chosen]
    new = (memory[1:] != memory[:-1]) | (level[1:] - level[:-1] > groupby) | (groupby <= 0)
    return np.concatenate([[0], np.cumsum(new)])[: len(chosen)]


def triggers(
    graph: Graph, levels: Levels, edges: Edges, first: NDArray[np.int64], ahead: int | None
) -> NDArray[np.int64]:
    """Return the operation after which each copy may begin, a predecessor of that copy's first reader b.

    The operation is ``ahead`` levels and one before b, and above the level of the value's producer; -1 if
    none exists. The published search looks back ten levels further; on the longest path to b there is an
    operation at every level, so that this search ends at the first.
    """
    reader, maker = edges.reader[first], graph.producer[edges.memory[first]]
    level = edges.level[first]
    if ahead is None:
        order = np.argsort(level, kind="stable")
        at = np.empty(len(first), np.int64)
        at[order] = np.concatenate([level[order[:1]] - _FIRST_AHEAD, level[order[:-1]]])
        at = np.minimum(at, level - 1)
    else:
        at = level - ahead - 1
    found = levels.before(reader, at)
    return np.where((at > levels.level[maker]) & (found > maker), found, -1)


def copies(graph: Graph, levels: Levels, edges: Edges, rules: Rules) -> Copies:
    """Return the swap-ins that the rules require."""
    chosen = beyond(edges, rules.threshold)
    if rules.most is not None:
        values = np.unique(edges.memory[chosen])
        early = values[np.lexsort((values, levels.level[graph.producer[values]]))][: rules.most]
        chosen = chosen[np.isin(edges.memory[chosen], early)]
    copy = fused(edges, chosen, rules.groupby)
    start = np.flatnonzero(np.diff(copy, prepend=-1))
    first = chosen[start]
    trigger = triggers(graph, levels, edges, first, rules.ahead)
    if len(start):  # in graph order, a reader may precede one of a lower level
        trigger[trigger >= np.minimum.reduceat(edges.reader[chosen], start)] = -1
    return Copies(chosen, copy, first, trigger)


def rewriting_of(edges: Edges, chosen: Copies, sync: Sync) -> Rewriting:
    """Convert copies to decisions."""
    ends = np.searchsorted(chosen.copy, np.arange(len(chosen.first) + 1))
    by_value: dict[int, list[SwapIn]] = {}
    readers, trigger = edges.reader[chosen.edge].tolist(), chosen.trigger.tolist()
    for copy, value in enumerate(edges.memory[chosen.first].tolist()):
        one = SwapIn(tuple(readers[ends[copy] : ends[copy + 1]]), trigger[copy])
        by_value.setdefault(value, []).append(one)
    return Rewriting(tuple(Swap(value, tuple(ins)) for value, ins in by_value.items()), sync=sync)


def published(graph: Graph, levels: Levels, rules: Rules, edges: Edges | None = None) -> Rewriting:
    """Return the decisions of the rules about a graph."""
    edges = candidates(graph, levels) if edges is None else edges
    return rewriting_of(edges, copies(graph, levels, edges, rules), rules.sync)
