"""Solvers by name, with the published memory planners as baselines.

To add a solver, write a function of a task and add it to `SOLVERS`, a baseline to `BASELINES`. The function
passes offsets to `Task.offer`, returns when `Task.done` is true, and sets `Task.stopped_by`; `_fit` does all
of this for one pass in a given order.

Each baseline makes one pass in one order, with the kernels of the other solvers. There are two placement
rules. *Best fit* and *first fit* place each buffer among the buffers already placed that are alive at the
same time: in the smallest or the lowest gap that is large enough, otherwise on top. *Lowest valley first*
builds the skyline from below and selects a buffer for each place.

Lifetimes, alignments and fixed offsets are those of this project, and all buffers are packed together.
Planners that round sizes or separate some buffers are worse in reality than here.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from solvers import _core
from solvers.packing.complete_search import TurnSearch
from solvers.packing.greedy import greedy, orders, run_fit, run_in_order, run_skylines
from solvers.packing.options import OPTIONS
from solvers.packing.task import Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.packing.jobs import Jobs

Solver = Callable[[Task], None]


def first_fit(task: Task) -> None:
    """Place largest first, ties by earlier start, in the lowest gap: TensorFlow Lite Micro's planner."""
    _fit(task, orders(task.jobs)["size"]())


def best_fit(task: Task) -> None:
    """Place largest first, ties by start, in the smallest gap: SmartPool as in Zhang et al. (2019)."""
    _fit(task, orders(task.jobs)["size"](), best_fit=True)


def smartpool(task: Task) -> None:
    """Place as `best_fit`, but as implemented in SINGA's SmartPool.

    With two or more occupied ranges, the gap below the lowest range is ignored. Buffers that live across
    iterations are packed with the others, as in SINGA's `SwapPool`; SINGA's `SmartMemPool` separates these
    buffers and reserves them twice.
    """
    _fit(task, orders(task.jobs)["size"](), best_fit=True, inner=True)


def greedy_by_size(task: Task) -> None:
    """Place as `best_fit`, but buffers alive all the time come first: TensorFlow Lite's `ArenaPlanner`."""
    jobs = task.jobs
    always = jobs.lifetime == jobs.end.max() - jobs.start.min()
    size, start = (np.where(always, 0, column) for column in (jobs.size, jobs.start[jobs.first]))
    _fit(task, np.lexsort((start, -size, ~always)).astype(np.int32), best_fit=True)


def best_fit_in_time(task: Task) -> None:
    """Place in order of allocation, in the smallest gap: an allocator without knowledge of the future.

    A buffer must avoid only the earlier buffers that are not yet freed. ONNX Runtime's `MemPatternPlanner`
    does the same on a recorded run. On a circle, buffers alive across the cut are placed first.
    """
    _fit(task, _in_time(task.jobs), best_fit=True)


def _in_time(jobs: Jobs) -> NDArray[np.int32]:
    return np.argsort(jobs.start[jobs.first], kind="stable").astype(np.int32)


def _fit(task: Task, order: NDArray[np.int32], *, best_fit: bool = False, inner: bool = False) -> None:
    if run_fit(task, task.jobs.native(), order, best_fit=best_fit, inner=inner, check_nodes=False):
        _finish(task)


def _skyline(task: Task, key: str) -> None:
    """Place lowest valley first (Burke, Kendall and Whitwell, 2004), the first job in the order that fits."""
    if run_in_order(task, orders(task.jobs)[key]()):
        _finish(task)


def _finish(task: Task) -> None:
    task.stopped_by = "bound" if task.arena <= task.lower_bound else "finished"


BASELINES: Mapping[str, Solver] = types.MappingProxyType(
    {
        "first_fit": first_fit,
        "best_fit": best_fit,
        "smartpool": smartpool,
        "greedy_by_size": greedy_by_size,
        "best_fit_in_time": best_fit_in_time,
        "skyline_lifetime": partial(_skyline, key="lifetime"),
        "skyline_size": partial(_skyline, key="size"),
        "skyline_area": partial(_skyline, key="area"),
    }
)


def auto(task: Task) -> None:
    """Run the skyline heuristics, then better bounds, then the searches in turn."""
    if run_skylines(task) and not _bounded(task):
        TurnSearch(task).run()


def _bounded(task: Task) -> bool:
    """Raise the lower bound above the load where possible; return whether the task is then done."""
    jobs = task.jobs
    even = (jobs.alignment == jobs.alignment[:1]).all() and not (jobs.fixed >= 0).any()
    uneven = not even or len(jobs.start) > len(jobs)
    task.bound(_core.stack_bound(jobs.native(), OPTIONS.stack_steps) if uneven else task.lower_bound)
    return task.done()


SOLVERS: Mapping[str, Solver] = types.MappingProxyType(
    {
        "auto": auto,
        "greedy": greedy,
        **BASELINES,
    }
)
