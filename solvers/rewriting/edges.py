"""Edges from memories to their readers, with distances: the input of the published rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting.levels import Levels, distances

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph


@dataclass(frozen=True, eq=False)
class Edges:
    """Readers of each memory, one row each, sorted by memory, the reader's level, then the reader.

    Attributes:
        memory: int64[E], the value that owns the memory.
        reader: int64[E], the operation.
        distance: int64[E], levels from the producer of the value that is read, the memory or a view, to the
            reader.
        level: int64[E], the reader's.
        others: int64[E], the last producer among the reader's other inputs, -1 for none.
        possible: bool[E], true if the reader may read a copy: the memory may leave, views can be recomputed.
        of_read: int64[R], the row of each read of the graph.
        made_by: int64[M], for a view the row of the producer, a reader of the memory; else -1.
        made_from: int64[M], for a view the first value of the same memory that the producer reads; else -1.
    """

    memory: NDArray[np.int64]
    reader: NDArray[np.int64]
    distance: NDArray[np.int64]
    level: NDArray[np.int64]
    others: NDArray[np.int64]
    possible: NDArray[np.bool_]
    of_read: NDArray[np.int64]
    made_by: NDArray[np.int64]
    made_from: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.memory)


def edges_of(graph: Graph, levels: Levels, allowed: NDArray[np.bool_]) -> Edges:
    """Return the edges of a graph; ``allowed``, bool[M], marks the values that a rule may move."""
    memory, reader, distance = graph.base[graph.reads], graph.reader, distances(graph, levels)
    order = np.lexsort((-distance, reader, levels.level[reader], memory))
    memory, reader, distance = (x[order] for x in (memory, reader, distance))
    first = np.ones(len(memory), bool)  # the longest of several reads of one memory by one operation
    first[1:] = (memory[1:] != memory[:-1]) | (reader[1:] != reader[:-1])
    of_read = np.empty(len(order), np.int64)
    of_read[order] = np.cumsum(first) - 1
    memory, reader, distance = (x[first] for x in (memory, reader, distance))
    made_by, made_from = _views(graph, of_read)
    possible = allowed[memory] & _again(graph, len(memory), of_read, made_by)
    return Edges(memory, reader, distance, levels.level[reader], _others(graph, memory, reader, levels),
                 possible, of_read, made_by, made_from)  # fmt: skip


def _views(graph: Graph, of_read: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return `Edges.made_by` and `Edges.made_from`; -1 for a view whose producer does not read the memory."""
    made_by, made_from = np.full(len(graph.size), -1), np.full(len(graph.size), -1)
    views = np.flatnonzero((graph.base != np.arange(len(graph.size))) & (graph.producer >= 0))
    for view, base, maker in zip(
        views.tolist(), graph.base[views].tolist(), graph.producer[views].tolist(), strict=True
    ):
        start, end = graph.reads_start[maker], graph.reads_start[maker + 1]
        same = np.flatnonzero(graph.base[graph.reads[start:end]] == base)
        if len(same):
            made_by[view], made_from[view] = of_read[start + same[0]], graph.reads[start + same[0]]
    return made_by, made_from


def _again(
    graph: Graph, count: int, of_read: NDArray[np.int64], made_by: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return a mask of the edges on which all views between memory and reader can be recomputed."""
    view = graph.base != np.arange(len(graph.size))
    stays, fine = view & ((made_by < 0) | ~graph.repeatable[graph.producer]), np.ones(count, bool)
    while True:
        now = fine.copy()
        now[of_read[stays[graph.reads]]] = False
        if (now == fine).all():
            return fine
        fine = now
        stays = stays | ((made_by >= 0) & ~fine[made_by])


def _others(
    graph: Graph, memory: NDArray[np.int64], reader: NDArray[np.int64], levels: Levels
) -> NDArray[np.int64]:
    """Return `Edges.others`, the last by level, then by index.

    Of each operation's reads, only the last producers for two different memories need to be known.
    """
    place = np.empty(len(graph), np.int64)
    place[levels.order()] = np.arange(len(graph))
    maker, by, base = graph.producer[graph.reads], graph.reader, graph.base[graph.reads]
    when = np.where(maker < 0, -1, place[maker]) if len(graph) else maker
    last, whose = np.full(len(graph), -1), np.full(len(graph), -1)
    second = np.full(len(graph), -1)
    order = np.argsort(when, kind="stable")
    last[by[order]], whose[by[order]] = when[order], base[order]  # the last of several wins
    rest = base != whose[by]
    np.maximum.at(second, by[rest], when[rest])
    at = np.where(whose[reader] == memory, second[reader], last[reader])
    return np.where(at < 0, -1, levels.order()[at])
