"""Conversion between graphs and the offload planner: a graph to a step, a schedule to offloads of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting.apply import apply_rewriting
from solvers.rewriting.graph import Role
from solvers.rewriting.records import Offload, Reload, Rewriting
from solvers.rewriting.runs import Runs
from solvers.swap.step import Step

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph
    from solvers.swap.schedule import Schedule


@dataclass(frozen=True, eq=False)
class GraphStep:
    """Step of a graph without offloads, but possibly with recomputed values.

    Attributes:
        step: the graph's operations, with the memories on the device as buffers: movable memories with all
            accesses, others with one access, so that they have no absence.
        base: int64[n], the value of the original graph that owns each buffer's memory; -1 for workspaces and
            for outside memory.
        runs: int64[K], the run number of each operation, as in `Rewriting`.
    """

    step: Step
    base: NDArray[np.int64]
    runs: NDArray[np.int64]

    def offloads(self, schedule: Schedule) -> tuple[Offload, ...]:
        """Return the moves of a schedule, all moves of a buffer as one offload."""
        order = np.lexsort([schedule.last, schedule.buffer])
        rows: dict[int, list[int]] = {}
        for row in order.tolist():
            rows.setdefault(int(schedule.buffer[row]), []).append(row)
        return tuple(self._offload(schedule, buffer, moves) for buffer, moves in rows.items())

    def _offload(self, schedule: Schedule, buffer: int, moves: list[int]) -> Offload:
        step, runs = self.step, self.runs
        low, high = np.searchsorted(step.access_buffer, [buffer, buffer + 1])
        ops = step.access_op[low:high]
        begins = [int(schedule.use[row]) for row in moves]
        ends = [*(int(schedule.last[row]) for row in moves[1:]), len(step)]
        reloads = tuple(
            Reload(
                tuple(runs[ops[(ops >= first) & (ops <= last)]].tolist()),
                int(runs[schedule.fetch[row] - 1]),
            )
            for row, first, last in zip(moves, begins, ends, strict=True)
        )
        out = moves[0]
        return Offload(
            int(self.base[buffer]),
            reloads,
            after=int(runs[schedule.out[out]]),
            release=int(runs[schedule.release[out]]),
        )


def offloadable(graph: Graph) -> NDArray[np.bool_]:
    """Return a mask of the memories that may move, bool[M].

    Such a memory is produced and freed in the graph, and all its views are cheap to recompute.
    """
    g = graph
    own = g.base == np.arange(len(g.size))
    held = np.zeros(len(g.size), np.bool_)
    np.logical_or.at(held, g.base, g.lasting | ~g.movable | g.host | (g.producer < 0))
    views = np.flatnonzero(~own)
    np.logical_or.at(held, g.base[views], ~_plain_views(graph)[g.producer[views]])
    result: NDArray[np.bool_] = own & ~held & (g.size > 0)
    return result


def _plain_views(graph: Graph) -> NDArray[np.bool_]:
    """Return a mask of the repeatable operations that only make views of a single memory."""
    g, n = graph, len(graph)
    if not n:
        return np.zeros(0, np.bool_)
    low, high = np.full(n, len(g.size)), np.full(n, -1)
    made = g.producer >= 0
    for owner, base in ((g.reader, g.base[g.reads]), (g.producer[made], g.base[made])):
        np.minimum.at(low, owner, base)
        np.maximum.at(high, owner, base)
    result: NDArray[np.bool_] = (low == high) & g.repeatable
    return result


def graph_step(
    graph: Graph, movable: NDArray[np.bool_], *, recomputed: tuple[int, ...] = (), outside: int = 0
) -> GraphStep:
    """Convert a graph, with some values recomputed, to a step.

    Args:
        graph: M values, not rewritten.
        movable: bool[M], whether a value's memory may be offloaded, unless recomputed.
        recomputed: as in `Rewriting`.
        outside: bytes always on the device outside the graph.

    Raises:
        PlanError: these values cannot be recomputed.
    """
    runs = np.arange(len(graph))
    if recomputed:
        graph, original = apply_rewriting(graph, Rewriting(recomputed=recomputed)), graph
        runs = _runs(graph, original)
        movable = np.concatenate([movable, np.zeros(len(graph.size) - len(movable), np.bool_)])
        movable[list(Runs(original, Rewriting(recomputed=recomputed)).recomputed)] = False
    n = len(graph)
    own = np.flatnonzero((graph.base == np.arange(len(graph.size))) & ~graph.host & (graph.size > 0))
    start, end = lifetimes(graph)
    busy = np.flatnonzero(graph.workspace > 0)
    row_of = np.full(len(graph.size), -1)
    row_of[own] = np.arange(len(own))
    reads = np.flatnonzero(movable[graph.base[graph.reads]] & (row_of[graph.base[graph.reads]] >= 0))
    buffer = np.concatenate([np.arange(len(own)), row_of[graph.base[graph.reads[reads]]]])
    op = np.concatenate([start[own], graph.reader[reads]])
    first = np.arange(len(buffer)) < len(own)
    key, index = np.unique(buffer * (n + 1) + op, return_index=True)
    rest = len(own) + np.arange(len(busy) + 1)
    step = Step(
        seconds=graph.seconds,
        operation=np.arange(n, dtype=np.int32),
        start=np.concatenate([start[own], busy, [0]]),
        end=np.concatenate([end[own], busy + 1, [n]]),
        size=np.concatenate([graph.size[own], graph.workspace[busy], [outside]]),
        persistent=np.zeros(len(own) + len(busy) + 1, np.bool_),
        ids=np.concatenate([own, np.full(len(busy) + 1, -1)]),
        access_buffer=np.concatenate([key // (n + 1), rest]),
        access_op=np.concatenate([key % (n + 1), busy, [0]]),
        access_writes=np.concatenate([first[index], np.ones(len(rest), np.bool_)]),
        names=graph.names,
    )
    return GraphStep(step, np.concatenate([graph.content[own], np.full(len(rest), -1)]), runs)


def _runs(graph: Graph, original: Graph) -> NDArray[np.int64]:
    """Return the run number of each operation in a graph with recomputed operations, as in `Rewriting`."""
    runs = np.empty(len(graph), np.int64)
    recomputed = graph.role == Role.RECOMPUTED
    runs[~recomputed] = np.arange(len(original))
    made = np.flatnonzero((graph.producer >= 0) & recomputed[graph.producer])
    runs[graph.producer[made]] = len(original) + original.producer[graph.content[made]]
    return runs


def lifetimes(graph: Graph) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the lifetime [start, end) of each memory, in operations."""
    n, m = len(graph), len(graph.size)
    made = np.maximum(graph.producer, 0)
    start, end = np.full(m, n), np.zeros(m, np.int64)
    np.minimum.at(start, graph.base, made)
    np.maximum.at(end, graph.base, np.where(graph.lasting, n, made + 1))
    np.maximum.at(end, graph.base[graph.reads], graph.reader + 1)
    return start, end
