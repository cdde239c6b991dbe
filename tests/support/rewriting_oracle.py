"""Proven shortest step under a limit, for small graphs: measures the optimality gap of decisions."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from offload_oracle import least_stall

from solvers.errors import PlanError
from solvers.rewriting.records import Rewriting
from solvers.rewriting.step_conversion import graph_step, offloadable

if TYPE_CHECKING:
    from solvers.rewriting.graph import Graph
    from solvers.swap.link import Link

#: Most candidates for recompute; with more, enumerating all sets is refused.
_MOST_VALUES = 10


def least_seconds(
    graph: Graph, link: Link, limit: int, *, outside_bytes: int = 0, ticks: int = 1 << 10
) -> tuple[Rewriting, float] | None:
    """Return the decisions with the shortest step, and the seconds of this step, minimal in whole ticks.

    Every set of recomputed values is tried, the cheapest first; for each, CP-SAT proves the offloads of least
    stall.

    Args:
        graph: a graph in whose forward pass repeatable operations produce at most ten memories.
        link: the copy times.
        limit: bytes of the device.
        outside_bytes: bytes always on the device outside the graph.
        ticks: ticks per second; operations are rounded down to whole ticks, copies up.

    Returns:
        None if no decision holds the limit.

    Raises:
        ValueError: a larger graph.
        UnprovenError: nothing was proven for a set that may belong to the shortest step.
    """
    g = graph
    made = np.flatnonzero((g.producer >= 0) & (g.base == np.arange(len(g.size))))
    values = [v for v in made.tolist() if not g.backward[g.producer[v]] and g.repeatable[g.producer[v]]]
    if len(values) > _MOST_VALUES:
        raise ValueError(f"the oracle knows graphs of up to {_MOST_VALUES} values to recompute")
    best: tuple[Rewriting, float] | None = None
    for _, chosen in sorted(_durations(graph, values, outside_bytes)):
        plan = graph_step(graph, offloadable(graph), recomputed=chosen, outside=outside_bytes)
        if best is not None and plan.step.duration >= best[1]:
            break
        solved = least_stall(plan.step, link, limit, ticks=ticks, early=True)
        if solved is None:
            continue
        seconds = plan.step.duration + solved[1]
        if best is None or seconds < best[1]:
            best = Rewriting(plan.offloads(solved[0]), chosen), seconds
    return best


def _durations(graph: Graph, values: list[int], outside_bytes: int) -> list[tuple[float, tuple[int, ...]]]:
    """Return the seconds without waiting of each feasible set of recomputed values, equivalent sets once."""
    found: dict[bytes, tuple[float, tuple[int, ...]]] = {}
    for count in range(len(values) + 1):
        for chosen in itertools.combinations(values, count):
            try:
                plan = graph_step(graph, offloadable(graph), recomputed=chosen, outside=outside_bytes)
            except PlanError:
                continue
            key = plan.runs.tobytes() + plan.step.load.tobytes() + plan.base.tobytes()
            found.setdefault(key, (plan.step.duration, chosen))
    return list(found.values())
