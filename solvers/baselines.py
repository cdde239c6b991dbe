"""What others do, by name, to compare with: one pass in one order, by the kernels that the other solvers use.

Two rules of placement. *Best* and *first fit* place each buffer among those placed before it that are alive
with it, in the smallest or the lowest gap that holds it, else on top. *Lowest valley first* builds from below
and looks for a buffer for each place.

Lifetimes, alignments and fixed offsets are ours, and what takes part is packed as one: where a planner rounds
sizes, or keeps buffers of some kind apart, the real one is worse than it is here.
"""

from __future__ import annotations

import types
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from solvers.greedy import in_order, orders, place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from solvers.jobs import Jobs
    from solvers.task import Task


def first_fit(task: Task) -> None:
    """Largest first, ties by earlier start, in the lowest gap: TensorFlow Lite Micro's planner."""
    _fit(task, orders(task.jobs)["size"]())


def best_fit(task: Task) -> None:
    """Largest first, ties by earlier start, in the smallest gap: SmartPool (Zhang et al., 2019), as meant."""
    _fit(task, orders(task.jobs)["size"](), best_fit=True)


def smartpool(task: Task) -> None:
    """`best_fit` as SINGA's SmartPool has it: with two ranges or more, the gap below the lowest is left out.

    What lives across iterations is packed with the rest, as by its `SwapPool`; its `SmartMemPool` keeps that
    apart and reserves it twice.
    """
    _fit(task, orders(task.jobs)["size"](), best_fit=True, inner=True)


def greedy_by_size(task: Task) -> None:
    """`best_fit`, but what is alive all the time comes first: TensorFlow Lite's `ArenaPlanner`."""
    jobs = task.jobs
    always = jobs.lifetime == jobs.end.max() - jobs.start.min()
    size, start = (np.where(always, 0, column) for column in (jobs.size, jobs.start[jobs.first]))
    _fit(task, np.lexsort((start, -size, ~always)).astype(np.int32), best_fit=True)


def best_fit_in_time(task: Task) -> None:
    """In order of allocation, in the smallest gap: an allocator that knows nothing of the future.

    When its turn comes, of what was placed before only what is not yet freed is in a buffer's way. ONNX
    Runtime's `MemPatternPlanner` does this on a recorded run. On a circle, what is alive where it is cut is
    there already.
    """
    _fit(task, _in_time(task.jobs), best_fit=True)


def _in_time(jobs: Jobs) -> NDArray[np.int32]:
    return np.argsort(jobs.start[jobs.first], kind="stable").astype(np.int32)


def _fit(task: Task, order: NDArray[np.int32], *, best_fit: bool = False, inner: bool = False) -> None:
    if place(task, task.jobs.native(), order, best_fit=best_fit, inner=inner, of_nodes=False):
        _finish(task)


def _skyline(task: Task, key: str) -> None:
    """Lowest valley first (Burke, Kendall and Whitwell, 2004): the first that lies within, by one order."""
    if in_order(task, orders(task.jobs)[key]()):
        _finish(task)


def _finish(task: Task) -> None:
    task.stopped_by = "bound" if task.arena <= task.lower_bound else "finished"


BASELINES: Mapping[str, Callable[[Task], None]] = types.MappingProxyType(
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
