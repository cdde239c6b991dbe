"""Solvers by name.

To add a solver, write a function of a task and add it to `SOLVERS`. The function passes offsets to
`Task.offer`, returns when `Task.done` is true, and sets `Task.stopped_by`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping

from solvers import _core
from solvers.packing.complete_search import TurnSearch
from solvers.packing.greedy import greedy, run_skylines
from solvers.packing.options import OPTIONS
from solvers.packing.task import Task

Solver = Callable[[Task], None]


def auto(task: Task) -> None:
    """Run the skyline heuristics, then better bounds, then the alternating searches."""
    if run_skylines(task) and not _bounded(task):
        TurnSearch(task).run()


def _bounded(task: Task) -> bool:
    """Raise the lower bound above the load if possible; return whether the task is done."""
    jobs = task.jobs
    even = (jobs.alignment == jobs.alignment[:1]).all() and not (jobs.fixed >= 0).any()
    uneven = not even or len(jobs.start) > len(jobs)
    task.bound(_core.stack_bound(jobs.native(), OPTIONS.stack_steps) if uneven else task.lower_bound)
    return task.done()


SOLVERS: Mapping[str, Solver] = types.MappingProxyType({"auto": auto, "greedy": greedy})
