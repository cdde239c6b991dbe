"""The solvers by name. A new solver is a file with a function of a task, and a line here."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping

from solvers import _core, baselines, branching, exact, greedy
from solvers.task import Task

#: Up to this many jobs "auto" asks the exact solver when so many nodes have left a gap,
FEW, _NODES_FIRST = 60, 2_000_000_000
#: for one of CP-SAT's deterministic seconds per so many nodes of the budget.
_NODES_A_SECOND = 100_000_000
#: Steps that the bound of stacks may take; some ten milliseconds.
_STEPS = 4_000_000

Solver = Callable[[Task], None]


def auto(task: Task) -> None:
    """All that there is: heuristics, bounds and searches; for few jobs, after a while, the exact solver."""
    asked = len(task.jobs) <= FEW and exact.available()
    search(task, _NODES_FIRST if asked else None)
    if asked and task.stopped_by in ("", "nodes", "time"):
        exact.prove(task, _NODES_A_SECOND)


def search(task: Task, nodes: int | None = None) -> None:
    """Valley by valley, then better bounds, then the searches in turn for about so many nodes."""
    order = greedy.valleys(task)
    if order is not None and not _bounded(task):
        branching.take_turns(task, order, nodes)


def _bounded(task: Task) -> bool:
    """Raise the bound where one can be had that is better than the load; whether that settles it."""
    jobs = task.jobs
    even = (jobs.alignment == jobs.alignment[:1]).all() and not (jobs.fixed >= 0).any()
    uneven = not even or len(jobs.start) > len(jobs)
    task.bound(_core.stack_bound(jobs.native(), _STEPS) if uneven else task.lower_bound)
    return task.done()


SOLVERS: Mapping[str, Solver] = types.MappingProxyType(
    {
        "auto": auto,
        "search": search,
        "greedy": greedy.greedy,
        "exact": exact.exact,
        **baselines.BASELINES,
    }
)
