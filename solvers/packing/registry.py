"""Registry of the solvers by name. To add a solver, write a function of a task and register that here."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping

from solvers import _core
from solvers.packing import baselines, branching, exact, greedy
from solvers.packing.task import Task

#: Largest number of jobs for which "auto" calls the exact solver, and the nodes that the searches spend
#: before.
FEW, _NODES_FIRST = 60, 2_000_000_000
#: Nodes of the budget per deterministic second of CP-SAT when "auto" calls the exact solver.
_NODES_A_SECOND = 100_000_000
#: Largest number of steps of the stack bound; some ten milliseconds.
_STEPS = 4_000_000

Solver = Callable[[Task], None]


def auto(task: Task) -> None:
    """Run heuristics, bounds and searches, then the exact solver (if installed) on at most `FEW` jobs."""
    asked = len(task.jobs) <= FEW and exact.available()
    search(task, _NODES_FIRST if asked else None)
    if asked and task.stopped_by in ("", "nodes", "time"):
        exact.prove(task, _NODES_A_SECOND)


def search(task: Task, nodes: int | None = None) -> None:
    """Run the skyline heuristics, then better bounds, then the searches in turn for about `nodes` nodes."""
    order = greedy.valleys(task)
    if order is not None and not _bounded(task):
        branching.take_turns(task, order, nodes)


def _bounded(task: Task) -> bool:
    """Raise the lower bound above the load where possible; return whether the task is then done."""
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
