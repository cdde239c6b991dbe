"""Early copies out: a copy begins as soon as the link is free, while the value is still read."""

from __future__ import annotations

import bisect
from dataclasses import replace
from typing import TYPE_CHECKING

from solvers.rewriting.graph import Role
from solvers.rewriting.judge import simulate
from solvers.rewriting.release_times import runs_of
from solvers.rewriting.rewrite import rewrite

if TYPE_CHECKING:
    from solvers.rewriting.graph import Graph
    from solvers.rewriting.rewriting import Rewriting
    from solvers.swap.link import Link


def copied_early(graph: Graph, rewriting: Rewriting, link: Link) -> Rewriting:
    """Request copies out earlier if that may help, with otherwise equal decisions.

    No operation writes into a value, so a copy may begin when the value is produced. Whenever the link is
    free, the produced value that is waited for first is copied. Memory is unchanged.

    Args:
        graph: the captured graph.
        rewriting: decisions about this graph, each swap with a release.
        link: the copy times.
    """
    made = rewrite(graph, rewriting)
    timed, runs = simulate(made, link), runs_of(made, graph)
    rows = [row for row in range(len(made)) if made.role[row] in (Role.ORIGINAL, Role.RECOMPUTED)]
    ends = [float(timed.begins[row] + made.seconds[row]) for row in rows]
    place = {run: row for row, run in enumerate(runs.tolist())}
    at = {row: index for index, row in enumerate(rows)}
    swaps = sorted(rewriting.swaps, key=lambda swap: place.get(swap.release, len(made)))
    waiting = [(at[place[int(graph.producer[swap.value])]], swap) for swap in swaps if swap.release >= 0]
    now, after = 0.0, dict[int, int]()
    while waiting:
        first = next((one for one in waiting if ends[one[0]] <= now), None)
        if first is None:
            now = min(ends[index] for index, _ in waiting)
            continue
        waiting.remove(first)
        index, swap = first
        latest = at[place[swap.after]] if swap.after >= 0 else index  # unchanged, so before the release
        index = min(max(index, bisect.bisect_right(ends, now) - 1), latest)
        while made.names[rows[index]] != _name(graph, int(runs[rows[index]])):
            index -= 1  # a recomputed view is not a run of its own
        after[swap.value] = int(runs[rows[index]])
        now += float(link.out(graph.size[swap.value]))
    return replace(
        rewriting,
        swaps=tuple(replace(swap, after=after.get(swap.value, swap.after)) for swap in rewriting.swaps),
    )


def _name(graph: Graph, run: int) -> str:
    again, operation = divmod(run, len(graph))
    return f"again.{graph.names[operation]}" if again else graph.names[operation]
