"""Offload by distance: every value that is read many levels after its producer, whatever the times.

The threshold rule of Le et al. (ISMM 2019), for programs that offload without a memory limit. The *level* of
an operation is the length of the longest path to it; the *distance* of a read is the difference of levels
between the producer of the value and the reader.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting.records import Offload, Reload, Rewriting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph


def offload_beyond(graph: Graph, threshold: int, *, shared_levels: int = 5) -> Rewriting:
    """Offload every value to its readers at a distance of more than ``threshold`` levels.

    A reload may begin after the operation two levels before its first reader on the longest path to that
    reader; without such an operation after the value's producer, it directly precedes the reader. Readers
    of a value at most ``shared_levels`` apart share a reload.
    """
    if not len(graph):
        return Rewriting()
    levels = levels_of(graph)
    edges = edges_of(graph, levels)
    rows = np.flatnonzero(edges.possible & (edges.distance > threshold))
    memory, level = edges.memory[rows], edges.level[rows]
    apart = (memory[1:] != memory[:-1]) | (np.diff(level) > shared_levels)
    starts = np.flatnonzero(np.concatenate([[True], apart]))[: len(rows)]
    before = levels.longest[edges.reader[rows[starts]]]
    trigger = np.where(before < 0, -1, levels.longest[before])
    return offloads_by_group(graph, levels, edges, rows, starts, trigger)


def offloads_by_group(
    graph: Graph,
    levels: Levels,
    edges: Edges,
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    trigger: NDArray[np.int64],
) -> Rewriting:
    """Return one reload for each group of edges.

    Args:
        graph: the graph.
        levels: its levels.
        edges: its edges.
        rows: int64[C], the edges whose readers read a reload.
        starts: int64[K], the first of each group in ``rows``.
        trigger: int64[K], the operation after which each reload may begin; one that does not lie between the
            producer and all readers of the group counts as none.
    """
    groups = np.split(edges.reader[rows], starts[1:]) if len(starts) else []
    reloads: dict[int, list[Reload]] = {}
    for value, readers, begin in zip(
        edges.memory[rows[starts]].tolist(), groups, trigger.tolist(), strict=True
    ):
        producer = int(graph.producer[value])
        possible = producer < begin < readers.min() and levels.level[begin] > levels.level[producer]
        reloads.setdefault(value, []).append(Reload(tuple(readers.tolist()), begin if possible else -1))
    return Rewriting(tuple(Offload(value, tuple(found)) for value, found in reloads.items()))


def matching_operations(graph: Graph, filters: Sequence[str]) -> NDArray[np.bool_]:
    """Return a mask of operations whose kind, module or enclosing module matches a name filter (*, ?)."""

    def matches(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in filters)

    def enclosing(module: str) -> list[str]:
        parts = module.split(".")
        return [".".join(parts[: i + 1]) for i in range(len(parts))]

    # The last entry is for index -1: unknown.
    kinds = np.array([*map(matches, graph.kinds), False])
    modules = np.array([*(any(map(matches, enclosing(module))) for module in graph.modules), False])
    result: NDArray[np.bool_] = kinds[graph.kind] | modules[graph.module]
    return result


@dataclass(frozen=True, eq=False)
class Levels:
    """Categorised topological ordering.

    Attributes:
        level: int64[N], 0 for an operation without inputs and control predecessors; else one more than the
            highest level of the inputs' producers and control predecessors. Inputs of the graph have level 0.
        longest: int64[N], a predecessor on the level directly before, by data or control, -1 for none: the
            longest path to the operation, backwards.
    """

    level: NDArray[np.int64]
    longest: NDArray[np.int64]


def levels_of(graph: Graph) -> Levels:
    """Return the levels by data and control edges; O(operations + edges)."""
    level, longest = [0] * len(graph), [-1] * len(graph)
    predecessors: dict[int, list[int]] = {}
    for earlier, later in graph.control.tolist():
        predecessors.setdefault(later, []).append(earlier)
    producers, start = graph.producer[graph.reads].tolist(), graph.reads_start.tolist()
    for operation in range(len(graph)):
        highest, by = -1, -1
        own = producers[start[operation] : start[operation + 1]]
        for producer in [*own, *predecessors.get(operation, ())]:
            known = level[producer] if producer >= 0 else 0
            if known > highest or (known == highest and by < 0):
                highest, by = known, producer
        level[operation], longest[operation] = highest + 1, by
    return Levels(np.array(level, np.int64), np.array(longest, np.int64))


@dataclass(frozen=True, eq=False)
class Edges:
    """Readers of each memory, one row each, sorted by memory, the reader's level, then the reader.

    Attributes:
        memory: int64[E], the value that owns the memory.
        reader: int64[E], the operation.
        distance: int64[E], levels from the producer of the value that is read, the memory or a view, to the
            reader.
        level: int64[E], the reader's.
        possible: bool[E], true if the reader may read a reload: the memory may be offloaded, and all views
            between can be recomputed.
        of_read: int64[R], the row of each read of the graph.
        view_row: int64[M], for a view the row of the producer, a reader of the memory; else -1.
        view_source: int64[M], for a view the first value of the same memory that the producer reads; else -1.
    """

    memory: NDArray[np.int64]
    reader: NDArray[np.int64]
    distance: NDArray[np.int64]
    level: NDArray[np.int64]
    possible: NDArray[np.bool_]
    of_read: NDArray[np.int64]
    view_row: NDArray[np.int64]
    view_source: NDArray[np.int64]


def edges_of(graph: Graph, levels: Levels) -> Edges:
    """Return the edges of a graph."""
    producer = graph.producer[graph.reads]
    begin = np.where(producer < 0, 0, levels.level[producer])
    memory, reader = graph.base[graph.reads], graph.reader
    distance = levels.level[reader] - begin
    order = np.lexsort((-distance, reader, levels.level[reader], memory))
    memory, reader, distance = (column[order] for column in (memory, reader, distance))
    first = np.ones(len(memory), bool)  # the longest of several reads of one memory by one operation
    first[1:] = (memory[1:] != memory[:-1]) | (reader[1:] != reader[:-1])
    of_read = np.empty(len(order), np.int64)
    of_read[order] = np.cumsum(first) - 1
    memory, reader, distance = (column[first] for column in (memory, reader, distance))
    view_row, view_source = _views(graph, of_read)
    possible = _offloadable(graph)[memory] & _repeatable_views(graph, len(memory), of_read, view_row)
    level = levels.level[reader]
    return Edges(memory, reader, distance, level, possible, of_read, view_row, view_source)


def _offloadable(graph: Graph) -> NDArray[np.bool_]:
    """Return a mask of the values that the rule moves, bool[M]: produced, of two dimensions or more."""
    alone = graph.base == np.arange(len(graph.base))
    lasting = np.isin(graph.base, graph.base[graph.lasting])
    result: NDArray[np.bool_] = alone & graph.movable & ~lasting & ~graph.host & (graph.rank >= 2)
    return result & (graph.producer >= 0)


def _views(graph: Graph, of_read: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return `Edges.view_row` and `Edges.view_source`; -1 if the producer does not read the memory."""
    view_row, view_source = np.full(len(graph.size), -1), np.full(len(graph.size), -1)
    views = np.flatnonzero((graph.base != np.arange(len(graph.size))) & (graph.producer >= 0))
    for view in views.tolist():
        start, end = graph.reads_start[graph.producer[view] : graph.producer[view] + 2]
        same = np.flatnonzero(graph.base[graph.reads[start:end]] == graph.base[view])
        if len(same):
            view_row[view], view_source[view] = of_read[start + same[0]], graph.reads[start + same[0]]
    return view_row, view_source


def _repeatable_views(
    graph: Graph, count: int, of_read: NDArray[np.int64], view_row: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return a mask of the edges on which all views between memory and reader can be recomputed."""
    view = graph.base != np.arange(len(graph.size))
    fixed, result = view & ((view_row < 0) | ~graph.repeatable[graph.producer]), np.ones(count, bool)
    while True:
        now = result.copy()
        now[of_read[fixed[graph.reads]]] = False
        if (now == result).all():
            return result
        result = now
        fixed = fixed | ((view_row >= 0) & ~result[view_row])
