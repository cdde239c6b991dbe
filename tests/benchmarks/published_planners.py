"""Published memory planners, with the kernels of this project: one pass in one order each.

Lifetimes, alignments and fixed offsets are those of this project, and all buffers are packed together.
Planners that round sizes or separate some buffers are worse in reality than here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from solvers import _core
from solvers.packing.greedy import orders, run_in_order
from solvers.packing.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from solvers.packing.task import Task


def _fit(task: Task, order: NDArray[np.int32], *, best_fit: bool) -> None:
    packer = _core.FitPacker(task.jobs.native())
    packer.begin(order, best_fit=best_fit)
    while not packer.advance(OPTIONS.slice):
        if reason := task.budget.reached_limit(check_nodes=False):
            task.stopped_by = reason
            return
    task.offer(packer.offsets, packer.arena)
    task.stopped_by = "finished"


def _by_size(task: Task, *, best_fit: bool) -> None:
    _fit(task, orders(task.jobs)["size"](), best_fit=best_fit)


def greedy_by_size(task: Task) -> None:
    """Place in the smallest gap, buffers alive all the time first: TensorFlow Lite's `ArenaPlanner`."""
    jobs = task.jobs
    always = jobs.lifetime == jobs.end.max() - jobs.start.min()
    size, start = (np.where(always, 0, column) for column in (jobs.size, jobs.start[jobs.first]))
    _fit(task, np.lexsort((start, -size, ~always)).astype(np.int32), best_fit=True)


def best_fit_in_time(task: Task) -> None:
    """Place in order of allocation, in the smallest gap: ONNX Runtime's `MemPatternPlanner`."""
    order = np.argsort(task.jobs.start[task.jobs.first], kind="stable").astype(np.int32)
    _fit(task, order, best_fit=True)


def _skyline(task: Task, key: str) -> None:
    """Place lowest valley first, the first job in the order that fits: Burke, Kendall and Whitwell (2004)."""
    run_in_order(task, orders(task.jobs)[key]())
    task.stopped_by = task.stopped_by or "finished"


#: `first_fit` is TensorFlow Lite Micro's `GreedyMemoryPlanner`, `best_fit` SmartPool (Zhang et al., 2019).
PUBLISHED: dict[str, Callable[[Task], None]] = {
    "first_fit": partial(_by_size, best_fit=False),
    "best_fit": partial(_by_size, best_fit=True),
    "greedy_by_size": greedy_by_size,
    "best_fit_in_time": best_fit_in_time,
    **{f"skyline_{key}": partial(_skyline, key=key) for key in ("lifetime", "size", "area")},
}
