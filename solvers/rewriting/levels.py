"""Categorised topological ordering (Le et al., ISMM 2019): operations that can run together share a level."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph


@dataclass(frozen=True, eq=False)
class Levels:
    """Levels of the operations of a graph, with the longest path to each operation.

    Attributes:
        level: int64[N], 0 for an operation without inputs and control predecessors; else one more than the
            highest level of the inputs' producers and control predecessors. Inputs of the graph have level 0.
        longest: int64[N], a predecessor on the level directly before, by data or control, -1 for none: the
            longest path to the operation, backwards.
    """

    level: NDArray[np.int64]
    longest: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.level.max(initial=-1)) + 1

    def order(self) -> NDArray[np.int64]:
        """Return the operations level by level, within a level in the order of the graph."""
        return np.argsort(self.level, kind="stable")

    def sets(self) -> list[NDArray[np.int64]]:
        """Return the operations of each level."""
        return np.split(self.order(), np.searchsorted(np.sort(self.level), np.arange(1, len(self))))

    def before(self, operation: NDArray[np.int64], level: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each operation a predecessor at a level, -1 if none; O(log levels) steps."""
        found = operation.copy()
        jumps = self._jumps
        for power in reversed(range(len(jumps))):
            there = np.where(found < 0, -1, jumps[power][found])
            far = (there >= 0) & (self.level[there] >= level)
            found[far] = there[far]
        exact = (found >= 0) & (self.level[found] == level)
        return np.where(exact, found, -1)

    @cached_property
    def _jumps(self) -> list[NDArray[np.int64]]:
        """For each power of two, the predecessor so many levels before each operation."""
        jumps = [self.longest]
        while (jumps[-1] >= 0).any():
            jumps.append(np.where(jumps[-1] < 0, -1, jumps[-1][jumps[-1]]))
        return jumps


def levels_of(graph: Graph) -> Levels:
    """Return the categorised topological ordering, by data and control edges; O(operations + edges)."""
    level, longest = [0] * len(graph), [-1] * len(graph)
    followed: dict[int, list[int]] = {}
    for earlier, later in graph.control.tolist():
        followed.setdefault(later, []).append(earlier)
    makers, start = graph.producer[graph.reads].tolist(), graph.reads_start.tolist()
    for operation in range(len(graph)):
        highest, by = -1, -1
        for maker in [*makers[start[operation] : start[operation + 1]], *followed.get(operation, ())]:
            known = level[maker] if maker >= 0 else 0
            if known > highest or (known == highest and by < 0):
                highest, by = known, maker
        level[operation], longest[operation] = highest + 1, by
    return Levels(np.array(level, np.int64), np.array(longest, np.int64))


def distances(graph: Graph, levels: Levels) -> NDArray[np.int64]:
    """Return level of the reader minus level of the producer for each read, int64[R]; inputs have level 0."""
    maker = graph.producer[graph.reads]
    made = np.where(maker < 0, 0, levels.level[maker]) if len(graph) else maker
    return levels.level[graph.reader] - made


def serialised(graph: Graph, levels: Levels, most_bytes: int) -> Graph:
    """Chain the operations of each level that produces more than ``most_bytes`` one after the other.

    Memory-aware ordering of Le et al. The levels of the returned graph must be computed again, since there
    are more of them.
    """
    made = graph.producer >= 0
    makes = np.zeros(len(graph), np.int64)
    np.add.at(makes, graph.producer[made], graph.size[made])
    total = np.zeros(len(levels), np.int64)
    np.add.at(total, levels.level, makes)
    order = levels.order()
    same = levels.level[order[:-1]] == levels.level[order[1:]]
    chained = same & (total[levels.level[order[:-1]]] > most_bytes)
    chain = np.stack([order[:-1][chained], order[1:][chained]], axis=1)
    return graph.with_columns(control=np.concatenate([graph.control, chain]))
