"""Greedy packing heuristics: first fit, best fit and skyline in several orders, then local repair.

The skyline heuristics are "lowest valley first" and "maximum load first".
Functions that return a bool return false if the search should stop, at a limit or with a good plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from solvers import _core
from solvers.packing.options import OPTIONS
from solvers.packing.task import run_aside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from solvers.packing.jobs import Jobs
    from solvers.packing.task import Task

    #: A function that computes an order of jobs on demand: int32[n].
    Order = Callable[[], NDArray[np.int32]]

#: Largest sum of padded sizes in bytes that the kernels can add in 64 bits.
_MOST_BYTES = 2.0**61


def greedy(task: Task) -> None:
    """Run the quick orders, then local repair until the budget is spent.

    Lowest valley first reaches the peak load on most traces of training; repair helps on irregular traces.
    """
    if run_heuristics(task):
        _repair(task)


def run_heuristics(task: Task) -> bool:
    """Run only the quick orders, which always give offsets; return whether to continue."""
    return run_skylines(task) and run_fits(task)


def run_skylines(task: Task) -> bool:
    """Run the skyline heuristics; return whether to continue.

    The sequence is lowest valley first by start time, which is quick; maximum load first, nearly always the
    best; then lowest valley first in the other orders, unless there are very many jobs.
    """
    others = orders(task.jobs)
    start = others.pop("start")()
    if not run_in_order(task, start) or _near_enough(task):
        return False
    if not _run_max_load_first(task, start):
        return False
    return len(task.jobs) > OPTIONS.single_order or all(
        run_in_order(task, order()) for order in others.values()
    )


def run_in_order(task: Task, order: NDArray[np.int32]) -> bool:
    """Pack lowest valley first in the given order; return whether to continue."""
    native = task.jobs.native()
    return _offer_pass(
        task, run_aside(task, lambda cancel: _core.pack_in_order(native, order, cancel)), OPTIONS.order_work
    )


def _run_max_load_first(task: Task, order: NDArray[np.int32]) -> bool:
    """Pack maximum load first, jobs with gaps in the given order; return whether to continue."""
    native = task.jobs.native()
    task.max_load_first_offsets = run_aside(
        task, lambda cancel: _core.pack_max_load_first(native, order, task.target, cancel)
    )
    return _offer_pass(task, task.max_load_first_offsets, OPTIONS.max_load_first_work)


def can_repair(jobs: Jobs) -> bool:
    """Return whether the padded sizes sum to at most `_MOST_BYTES`, as the repair kernels require."""
    total = (jobs.size.astype(np.float64) + jobs.alignment).sum() + jobs.fixed.max(initial=0)
    return bool(total <= _MOST_BYTES)


def _offer_pass(task: Task, offsets: NDArray[np.int64] | None, units: int) -> bool:
    """Offer the offsets, if any, to the task, and charge the work units per job.

    Return whether to continue.
    """
    if offsets is None:
        return False
    task.offer(offsets, int((offsets + task.jobs.size).max()))
    task.budget.nodes += task.budget.at_most_half(units * len(task.jobs))
    return not task.done(check_nodes=False)


def _near_enough(task: Task) -> bool:
    """Return whether the gap is small, and closing it would cost more than the remaining budget.

    This happens when very many jobs almost reach the bound. With a target above the lower bound, the gap
    never counts as small.
    """
    left = task.budget.nodes_left
    if left is None or left >= OPTIONS.max_load_first_work * len(task.jobs):
        return False
    if task.target > task.lower_bound or task.arena > task.target * (1 + OPTIONS.near_gap):
        return False
    task.stopped_by = "nodes"
    return True


def _offset_order(offsets: NDArray[np.int64] | None) -> NDArray[np.int32]:
    assert offsets is not None
    return np.argsort(offsets, kind="stable").astype(np.int32)


def run_fits(task: Task) -> bool:
    """Run first and best fit in each order; return whether to continue.

    The first order is by ascending offset in the best plan so far. In this order, first fit places no job
    higher than before: only jobs that have not risen lie below the job's old offset, so the old offset is
    still free.
    """
    native = task.jobs.native()
    again = task.offsets is not None and len(task.jobs) <= OPTIONS.sorted_by_start
    if again and not _run_fit(task, native, _offset_order(task.offsets)):
        return False
    if len(task.jobs) <= OPTIONS.fit_limit:
        for order in orders(task.jobs).values():
            for rule in (False, True):
                if not _run_fit(task, native, order(), best_fit=rule):
                    return False
    return not task.done()


def orders(jobs: Jobs) -> dict[str, Order]:
    """Return functions that compute placement orders, int32[n], by name; the quickest to pack with first."""

    def start() -> NDArray[np.int64]:
        return jobs.start[jobs.first]

    def area() -> NDArray[np.float64]:
        return jobs.lifetime.astype(np.float64) * jobs.size

    def by(*keys: NDArray[Any]) -> NDArray[np.int32]:
        return np.lexsort(keys).astype(np.int32)

    def by_start() -> NDArray[np.int32]:
        # The native order is quicker, and ignores the lifetimes of jobs across the cut of a circle.
        return (
            jobs.native().start_order
            if len(jobs) > OPTIONS.sorted_by_start
            else by(-jobs.size, -jobs.lifetime, start())
        )

    return {
        "start": by_start,
        "size": lambda: by(start(), -jobs.size),
        "area": lambda: by(start(), -area()),
        "lifetime": lambda: by(-jobs.size, -jobs.lifetime),
    }


def _run_fit(task: Task, native: _core.Jobs, order: NDArray[np.int32], *, best_fit: bool = False) -> bool:
    """Run one first-fit or best-fit pass; return whether all jobs were placed before a limit was reached.

    Args:
        task: the task that receives the offsets.
        native: the task's jobs for the kernels.
        order: jobs in order of placement, int32[n].
        best_fit: choose the smallest gap that holds the job; the lowest gap otherwise.
    """
    packer = _core.FitPacker(native)
    packer.begin(order, best_fit=best_fit)
    for nodes in _slices(task, packer):
        if packer.advance(nodes):
            task.offer(packer.offsets, packer.arena)
            return True
    return False


def _repair(task: Task) -> None:
    assert task.offsets is not None
    if not can_repair(task.jobs):
        task.stopped_by = "finished"
        return
    search = _core.LocalRepair(task.jobs.native(), task.offsets, task.seed % 2**64)
    for nodes in _slices(task, search):
        if search.advance(nodes, task.target):
            task.offer(search.offsets, search.arena)


def _slices(task: Task, search: _core.FitPacker | _core.LocalRepair) -> Iterator[int]:
    """Yield the nodes of the next slice until a limit is reached, and charge each slice to the budget.

    The length of a slice does not depend on the clock, so a node budget gives the same plan on every machine.
    """
    charged = search.work
    while not task.done():
        left = task.budget.nodes_left
        yield OPTIONS.slice if left is None else min(OPTIONS.slice, left)
        task.budget.nodes += search.work - charged
        charged = search.work
