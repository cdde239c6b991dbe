"""Recompute by minimum cuts: the cheapest sets of values to recompute at a price of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph

#: Total of all costs as whole numbers in the cut; and the cost of a forbidden arc, more than this total.
_TOTAL = 1 << 50
_NEVER = 1 << 56


class Cuts:
    """Values to recompute at a price, as a minimum cut of the forward pass.

    Each forward operation is either recomputed, at the cost of the operation's seconds, or not. Each memory
    that the backward pass or a recomputed operation needs is either kept, at a price, or produced by a
    recomputed operation. The least sum of both is a minimum cut, as in PyTorch's min-cut partitioner, with
    seconds beside bytes.

    Attributes:
        saved: bool[M], the memories that the backward pass reads itself.
    """

    def __init__(self, graph: Graph, may: NDArray[np.bool_]) -> None:
        """Build the arcs of the cut; ``may``, bool[M], marks the values that may be recomputed."""
        g = graph
        n = len(g)
        self._graph = g
        forward = (g.producer >= 0) & ~g.backward[g.producer]
        self._own = np.flatnonzero(forward & (g.base == np.arange(len(g.size))))
        self._row = np.full(len(g.size), -1)
        self._row[self._own] = np.arange(len(self._own))
        self.saved = np.zeros(len(g.size), np.bool_)
        self.saved[g.base[g.reads[g.backward[g.reader]]]] = True
        self.saved &= self._row >= 0
        banned = ~g.repeatable
        banned[g.producer[forward & ~may]] = True
        # A view that cannot be recomputed keeps its base: so the base is not recomputed either.
        views = np.flatnonzero(forward & (g.base != np.arange(len(g.size))))
        stiff = views[banned[g.producer[views]]]
        makers = g.producer[g.base[stiff]]
        banned[makers[makers >= 0]] = True
        # An operation with a control edge to a later one stays in its place.
        banned[g.control[:, 0]] = True
        self._banned = banned & ~g.backward
        self._arcs(n)

    def _arcs(self, n: int) -> None:
        """Build the arcs; nodes: operation i is i, memory j is n + j, then the source and the sink."""
        g, memories = self._graph, len(self._own)
        self._source, self._sink = n + memories, n + memories + 1
        self._operations = np.flatnonzero(~g.backward)
        reads = ~g.backward[g.reader] & (self._row[g.base[g.reads]] >= 0)
        needed = n + self._row[g.base[g.reads[reads]]]
        must = n + self._row[np.flatnonzero(self.saved)]
        self._tail = np.concatenate(
            [np.full(len(self._operations), self._source), g.producer[self._own], needed, must]
        )
        self._head = np.concatenate(
            [self._operations, n + np.arange(memories), g.reader[reads], np.full(len(must), self._sink)]
        )
        self._fixed = len(needed) + len(must)

    def at(self, price: NDArray[np.float64]) -> tuple[tuple[int, ...], float]:
        """Return the memories to recompute at prices of keeping, float64[M], and the seconds of recompute.

        Prices are in seconds.
        """
        from ortools.graph.python import max_flow

        g = self._graph
        seconds = np.where(self._banned, 0.0, g.seconds)[self._operations]
        cost = np.maximum(price[self._own], 0.0)
        unit = _TOTAL / max(float(seconds.sum() + cost.sum()), 1e-30)
        again = np.where(self._banned[self._operations], _NEVER, (seconds * unit).astype(np.int64) + 1)
        keep = (cost * unit).astype(np.int64)
        capacity = np.concatenate([again, keep, np.full(self._fixed, _NEVER)]).astype(np.int64)
        solver = max_flow.SimpleMaxFlow()
        solver.add_arcs_with_capacity(self._tail.astype(np.int32), self._head.astype(np.int32), capacity)
        if solver.solve(self._source, self._sink) != solver.OPTIMAL:
            return (), 0.0
        sinks = np.zeros(self._sink + 1, np.bool_)
        sinks[solver.get_sink_side_min_cut()] = True
        needed = sinks[len(g) + np.arange(len(self._own))]
        made = needed & sinks[g.producer[self._own]]
        runs = np.unique(g.producer[self._own[made]])
        return tuple(self._own[made].tolist()), float(g.seconds[runs].sum())
