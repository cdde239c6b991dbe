"""Who reads which memory how long after it was made: what the rules of rewriting look at."""

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
    """The readers of each memory, one row each, by memory, then by the reader's level, then in their order.

    Attributes:
        memory: int64[E], the value whose memory it is.
        reader: int64[E], the operation.
        distance: int64[E], levels from what made the value that it reads, itself or a view, to the reader.
        level: int64[E], the reader's.
        through: int64[E], the row of the operation that made the view which is read, as a reader of the same
            memory; -1 where it reads the memory itself.
        others: int64[E], the last operation that makes anything else that the reader reads, -1 for none.
        possible: bool[E], whether the reader may read a copy: the memory may leave, views can be made again.
    """

    memory: NDArray[np.int64]
    reader: NDArray[np.int64]
    distance: NDArray[np.int64]
    level: NDArray[np.int64]
    through: NDArray[np.int64]
    others: NDArray[np.int64]
    possible: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.memory)


def edges_of(graph: Graph, levels: Levels, allowed: NDArray[np.bool_]) -> Edges:
    """The edges of a graph; ``allowed`` says of each value, bool[M], whether a rule may move it."""
    memory, reader, distance = graph.base[graph.reads], graph.reader, distances(graph, levels)
    order = np.lexsort((-distance, reader, levels.level[reader], memory))
    memory, reader, distance, read = (x[order] for x in (memory, reader, distance, graph.reads))
    first = np.ones(len(memory), bool)  # the longest of several reads of one memory by one operation
    first[1:] = (memory[1:] != memory[:-1]) | (reader[1:] != reader[:-1])
    memory, reader, distance, read = (x[first] for x in (memory, reader, distance, read))
    through = _through(graph, memory, reader, read)
    possible = allowed[memory] & _again(graph, reader, through)
    return Edges(memory, reader, distance, levels.level[reader], through,
                 _others(graph, memory, reader, levels), possible)  # fmt: skip


def _through(
    graph: Graph, memory: NDArray[np.int64], reader: NDArray[np.int64], read: NDArray[np.int64]
) -> NDArray[np.int64]:
    n = len(graph) + 1
    key = memory * n + reader
    order = np.argsort(key)
    wanted = memory * n + graph.producer[read]
    at = np.minimum(np.searchsorted(key[order], wanted), max(len(key) - 1, 0))
    row = order[at] if len(key) else at
    return np.where((read != memory) & (key[row] == wanted), row, -1) if len(key) else row


def _again(graph: Graph, reader: NDArray[np.int64], through: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether all views between a memory and its reader can be made again."""
    fine, row = np.ones(len(reader), bool), through
    while (row >= 0).any():
        fine &= (row < 0) | graph.repeatable[reader[row]]
        row = np.where(row < 0, -1, through[row])
    return fine


def _others(
    graph: Graph, memory: NDArray[np.int64], reader: NDArray[np.int64], levels: Levels
) -> NDArray[np.int64]:
    """By level, then by number; of an operation's reads at most two memories need to be known for that."""
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
