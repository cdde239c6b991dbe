"""Refinement of decisions: earlier offloads, and reloads that several readers share."""

from __future__ import annotations

import bisect
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting.apply import apply_rewriting
from solvers.rewriting.graph import Role
from solvers.rewriting.judge import simulate
from solvers.rewriting.records import Reload
from solvers.rewriting.runs import Runs

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph
    from solvers.rewriting.records import Offload, Rewriting
    from solvers.swap.link import Link


def offload_early(graph: Graph, rewriting: Rewriting, link: Link) -> Rewriting:
    """Request copies out earlier if that may help, with otherwise equal decisions.

    No operation overwrites a value, so a copy may begin once the value is produced. Whenever the link is
    free, it copies the value with the earliest wait. Memory is unchanged.

    Args:
        graph: the captured graph.
        rewriting: decisions about this graph, each offload with a release.
        link: the copy times.
    """
    made = apply_rewriting(graph, rewriting)
    timed, runs = simulate(made, link), _runs_of(made, graph)
    rows = [row for row in range(len(made)) if made.role[row] in (Role.ORIGINAL, Role.RECOMPUTED)]
    ends = [float(timed.begins[row] + made.seconds[row]) for row in rows]
    place = {run: row for row, run in enumerate(runs.tolist())}
    at = {row: index for index, row in enumerate(rows)}
    offloads = sorted(rewriting.offloads, key=lambda offload: place.get(offload.release, len(made)))
    offloads = [offload for offload in offloads if offload.release >= 0]
    waiting = [(at[place[int(graph.producer[offload.value])]], offload) for offload in offloads]
    now, after = 0.0, dict[int, int]()
    while waiting:
        first = next((row for row in waiting if ends[row[0]] <= now), None)
        if first is None:
            now = min(ends[index] for index, _ in waiting)
            continue
        waiting.remove(first)
        index, offload = first
        latest = at[place[offload.after]] if offload.after >= 0 else index  # unchanged: before the release
        index = min(max(index, bisect.bisect_right(ends, now) - 1), latest)
        while made.names[rows[index]] != _name(graph, int(runs[rows[index]])):
            index -= 1  # a recomputed view has no run
        after[offload.value] = int(runs[rows[index]])
        now += float(link.out(graph.size[offload.value]))

    def earlier(offload: Offload) -> Offload:
        return replace(offload, after=after.get(offload.value, offload.after))

    return replace(rewriting, offloads=tuple(map(earlier, rewriting.offloads)))


def _runs_of(made: Graph, graph: Graph) -> NDArray[np.int64]:
    """Return each row's run, or for an inserted row the next run."""
    names = {name: op for op, name in enumerate(graph.names)}
    names |= {f"recompute.{name}": len(graph) + op for op, name in enumerate(graph.names)}
    runs = np.empty(len(made), np.int64)
    run = -1
    for row in range(len(made) - 1, -1, -1):
        run = names.get(made.names[row], run)
        runs[row] = run
    return runs


def _name(graph: Graph, run: int) -> str:
    recomputed, operation = divmod(run, len(graph))
    return f"recompute.{graph.names[operation]}" if recomputed else graph.names[operation]


def merge_shared_reloads(
    graph: Graph, rewriting: Rewriting, kernels: Collection[frozenset[int]]
) -> Rewriting:
    """Merge the reloads of a value for runs that a compiler fuses into one kernel.

    The first of these reloads serves the readers of all merged reloads.

    Args:
        graph: the captured graph.
        rewriting: decisions about this graph.
        kernels: the runs inside each kernel; a run may be in several kernels.
    """
    runs = Runs(graph, rewriting)
    several = [group for group in kernels if len(group) > 1]

    def first(reload: Reload) -> tuple[int, bool, int]:
        return min(map(runs.place, reload.consumers))

    def with_shared(offload: Offload) -> Offload:
        reloads = offload.reloads
        for group in several if len(reloads) > 1 else ():
            same = [reload for reload in reloads if not group.isdisjoint(reload.consumers)]
            if len(same) > 1:
                readers = sorted((run for reload in same for run in reload.consumers), key=runs.place)
                first_reload = Reload(tuple(readers), min(same, key=first).trigger)
                reloads = (*(reload for reload in reloads if reload not in same), first_reload)
        if reloads is offload.reloads:
            return offload
        return replace(offload, reloads=tuple(sorted(reloads, key=first)))

    return replace(rewriting, offloads=tuple(map(with_shared, rewriting.offloads)))
