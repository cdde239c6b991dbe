"""Greedy packing heuristics: first fit, best fit and skyline in several orders, then a search over orders.

The skyline heuristics are "lowest valley first", "maximum load first" (`solvers._core.pack_max_load_first`),
"peak first" and "peak outward" (`solvers.packing.peak_outward.Sides`), and window repair.
Functions that return a bool return false to tell the caller to stop: the plan is good enough or a limit was
reached.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers import _core
from solvers.packing.peak_outward import Sides
from solvers.packing.portfolio import Crew, end_crew, fill_sides
from solvers.packing.worker_thread import aside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from solvers.packing.jobs import Jobs
    from solvers.packing.task import Task

    #: A function that computes an order of jobs on demand: int32[n].
    Order = Callable[[], NDArray[np.int32]]

#: Work units of the kernels between two checks of the limits; up to some ten milliseconds.
_SLICE = 2_000_000
#: Jobs above which first and best fit are skipped: a pass is quadratic and would take the whole budget.
_MANY = 10_000
#: Jobs above which window repair runs before the other orders, which seldom help.
_FEW = 50_000
#: Jobs above which maximum load first takes seconds and the other orders are skipped.
_HUGE = 400_000
#: Work units per job charged for a skyline pass in a given order, and for a maximum-load-first pass;
#: measured.
_LOOKS_IN_ORDER, _LOOKS_BY_FULLEST = 50, 500
#: Largest number of work units for window repair before anything else is tried, about a second; and for
#: the short first run of window repair on one thread.
_LOOKS_OF_STRETCHES, _LOOKS_OF_SOME = 2**28, 2**26
#: Smallest fraction of all jobs alive at the peak for which the jobs at the peak are packed first; measured.
_MUCH = 0.125
#: Budget of the peak-outward heuristic in work units per job; measured.
LOOKS_OF_SIDES = 1_500
#: Gap, as a fraction of the target, above which maximum load first over all jobs may give a smaller arena.
_FAR = 0.01
#: Largest sum of padded sizes in bytes: the kernels add up sizes with their padding in 64 bits.
_MOST_BYTES = 2.0**61
#: Gap, as a fraction of the target, for which no step is begun that costs more than the remaining budget.
_NEAR = 1e-4


def greedy(task: Task) -> None:
    """Run every native kernel: the quick orders first, then a search over orders until the budget is spent.

    Lowest valley first reaches the peak load on most traces of training; the search over orders helps on
    irregular traces.
    """
    order = quick(task)
    if order is not None:
        _search(task, task.jobs.native(), order())


def quick(task: Task) -> Order | None:
    """Run only the quick orders and return the best order, or None if there is no reason to go on.

    The task always has offsets afterwards.
    """
    order = valleys(task)
    return order if order is not None and fits(task) else None


def valleys(task: Task) -> Order | None:
    """Run the skyline heuristics and return the best order, or None if there is no reason to go on.

    The sequence is: lowest valley first by start time, which is quick; peak first and peak outward, if many
    jobs are alive at the peak; maximum load first, nearly always the best; window repair, if there are more
    than `_FEW` jobs; then lowest valley first in the other orders, unless there are more than `_HUGE` jobs.
    """
    others = orders(task.jobs)
    best = others.pop("start")
    if not in_order(task, best()) or _near_enough(task):
        return None
    arena = task.arena
    if _is_crowded(task.jobs) and not (_peak_first(task) and _by_sides(task)):
        return None
    many = len(task.jobs) > _FEW
    if not (_of_many if many else _by_fullest)(task, best()):
        return None
    if many:
        task.by_what_is_alive = task.offsets
    if len(task.jobs) > _HUGE:
        return partial(_upwards, task.offsets)
    if task.arena < arena:
        best = partial(_upwards, task.offsets)
    for order in others.values():
        arena = task.arena
        if not in_order(task, order()):
            return None
        if task.arena < arena:
            best = order
    return best


def _of_many(task: Task, order: NDArray[np.int32]) -> bool:
    """Run maximum load first and window repair on many jobs; return whether to go on.

    With more than `_HUGE` jobs, window repair comes first. The peak-outward heuristic runs on another core,
    or on one thread between two runs of window repair, because window repair reaches the bound either soon or
    seldom.
    """
    if not can_stretch(task.jobs):
        return _by_fullest(task, order)
    if len(task.jobs) > _HUGE:
        if not _by_stretches(task):
            return False
        return task.arena <= task.target * (1 + _FAR) or _by_fullest(task, order)
    if _is_crowded(task.jobs) or not can_halve(task.jobs):
        return _by_fullest(task, order) and _by_stretches(task)
    if task.threads == 1:
        soon = _by_fullest(task, order) and _by_stretches(task, _LOOKS_OF_SOME)
        return soon and _by_sides(task) and _by_stretches(task)
    try:
        Crew(task, [fill_sides])
        return _by_fullest(task, order) and _by_stretches(task)
    finally:
        end_crew(task, wait=False)


def in_order(task: Task, order: NDArray[np.int32]) -> bool:
    """Pack lowest valley first in the given order; return whether there is a reason to go on."""
    native = task.jobs.native()
    return _tried(
        task, aside(task, lambda cancel: _core.pack_in_order(native, order, cancel)), _LOOKS_IN_ORDER
    )


def _is_crowded(jobs: Jobs) -> bool:
    """Return whether at least `_MUCH` of all jobs are alive at the peak, so that these are packed first."""
    return can_halve(jobs) and jobs.native().count_at_peak >= _MUCH * len(jobs)


def _peak_first(task: Task) -> bool:
    """Pack the jobs alive at the peak, then both sides lowest valley first; return whether to go on."""
    native = task.jobs.native()
    return _tried(
        task, aside(task, lambda cancel: _core.pack_peak_first(native, cancel)), 2 * _LOOKS_IN_ORDER
    )


def _by_sides(task: Task) -> bool:
    """Pack outward from the peak within the budget, `LOOKS_OF_SIDES` per job; return whether to go on."""
    work = Sides(task.jobs.native(), task.seed % 2**64)
    budget = task.watch.at_most_half(LOOKS_OF_SIDES * len(task.jobs))

    def advance(units: int) -> bool | None:
        return aside(task, lambda _: work.advance(units, task.target, task.arena))

    for nodes in _slices(task, work):
        if work.work >= budget or work.rounds:
            return True
        found = advance(min(nodes, budget - work.work))
        if found is None:
            return False
        if found and work.offsets is not None:
            task.offer(work.offsets, work.arena)
    return False


def _by_fullest(task: Task, order: NDArray[np.int32]) -> bool:
    """Pack maximum load first, jobs with gaps in the given order; return whether to go on."""
    native = task.jobs.native()
    return _tried(
        task,
        aside(task, lambda cancel: _core.pack_max_load_first(native, order, task.target, cancel)),
        _LOOKS_BY_FULLEST,
    )


def _by_stretches(task: Task, units: int = _LOOKS_OF_STRETCHES) -> bool:
    """Repair time windows of the best plan so far around its highest jobs; return whether to go on."""
    native, offsets, seed = task.jobs.native(), task.offsets, task.seed % 2**64
    assert offsets is not None
    work = aside(task, lambda _: _core.WindowRepair(native, offsets, seed))
    if work is None:
        return False
    budget = task.watch.at_most_half(units)
    for nodes in _slices(task, work):
        if work.work >= budget:
            return True
        if work.advance(min(nodes, budget - work.work), task.target):
            task.offer(work.offsets, work.arena)
    return False


def can_repair(jobs: Jobs) -> bool:
    """Return whether the padded sizes sum to at most `_MOST_BYTES`, as the repair kernels require."""
    total = (jobs.size.astype(np.float64) + jobs.alignment).sum() + jobs.fixed.max(initial=0)
    return bool(total <= _MOST_BYTES)


def can_stretch(jobs: Jobs) -> bool:
    """Return whether window repair is useful: no gaps or fixed offsets, since the highest job must move."""
    return len(jobs.start) == len(jobs) and not (jobs.fixed >= 0).any() and can_repair(jobs)


def can_halve(jobs: Jobs) -> bool:
    """Return whether the jobs alive at the peak can be stacked without a gap in addresses."""
    coarsest = int(jobs.alignment.max(initial=1))
    return can_stretch(jobs) and (coarsest == 1 or not (jobs.size % coarsest).any())


def _tried(task: Task, offsets: NDArray[np.int64] | None, units: int) -> bool:
    """Offer the offsets to the task, if any, and charge the work units per job; return whether to go on."""
    if offsets is None:
        return False
    task.offer(offsets, int((offsets + task.jobs.size).max()))
    task.watch.nodes += task.watch.at_most_half(units * len(task.jobs))
    return not task.done(of_nodes=False)


def _near_enough(task: Task) -> bool:
    """Return whether the remaining gap is small and closing the gap costs more than the remaining budget.

    This happens when very many jobs reach the bound except for some bytes. If the caller has set a target
    above the lower bound, the gap never counts as small.
    """
    left = task.watch.nodes_left
    if left is None or left >= _LOOKS_BY_FULLEST * len(task.jobs):
        return False
    if task.target > task.lower_bound or task.arena > task.target * (1 + _NEAR):
        return False
    task.stopped_by = "nodes"
    return True


def _upwards(offsets: NDArray[np.int64] | None) -> NDArray[np.int32]:
    assert offsets is not None
    return np.argsort(offsets, kind="stable").astype(np.int32)


def fits(task: Task) -> bool:
    """Run first and best fit in each order; return whether to go on.

    The first order is by ascending offset in the best plan so far. In this order, first fit places no job
    higher than before: only jobs that have not risen lie below the job's old offset, so the old offset is
    still free.
    """
    native = task.jobs.native()
    again = task.offsets is not None and len(task.jobs) <= _FEW
    if again and not place(task, native, _upwards(task.offsets)):
        return False
    if len(task.jobs) <= _MANY:
        for order in orders(task.jobs).values():
            for rule in (False, True):
                if not place(task, native, order(), best_fit=rule):
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
        return jobs.native().start_order if len(jobs) > _FEW else by(-jobs.size, -jobs.lifetime, start())

    return {
        "start": by_start,
        "size": lambda: by(start(), -jobs.size),
        "area": lambda: by(start(), -area()),
        "lifetime": lambda: by(-jobs.size, -jobs.lifetime),
    }


def place(
    task: Task,
    native: _core.Jobs,
    order: NDArray[np.int32],
    *,
    best_fit: bool = False,
    inner: bool = False,
    of_nodes: bool = True,
) -> bool:
    """Run one first-fit or best-fit pass; return whether all jobs were placed before a limit was reached.

    Args:
        task: the task that receives the offsets.
        native: the task's jobs for the kernels.
        order: jobs in order of placement, int32[n].
        best_fit: choose the smallest gap that holds the job; the lowest gap otherwise.
        inner: ignore the gap below the lowest range.
        of_nodes: stop at the node limit too.
    """
    packer = _core.FitPacker(native)
    packer.begin(order, best_fit=best_fit, inner=inner)
    for nodes in _slices(task, packer, of_nodes=of_nodes):
        if packer.advance(nodes):
            task.offer(packer.offsets, packer.arena)
            return True
    return False


def _search(task: Task, native: _core.Jobs, order: NDArray[np.int32]) -> None:
    search = _core.OrderSearch(native, order, task.seed % 2**64)
    task.offer(search.offsets, search.arena)  # may be at the target, then the search would find nothing
    for nodes in _slices(task, search):
        if search.advance(nodes, max(task.target, task.lower_bound)):
            task.offer(search.offsets, search.arena)


def _slices(
    task: Task,
    work: _core.FitPacker | _core.OrderSearch | _core.WindowRepair | Sides,
    *,
    of_nodes: bool = True,
) -> Iterator[int]:
    """Yield nodes to spend until a limit is reached, and charge the work done in between to the watch.

    The length of a slice does not depend on the clock, so a node budget gives the same plan on every machine.
    """
    charged = work.work
    while True:
        if task.offsets is not None and of_nodes:
            if task.done():
                return
        elif reason := task.watch.reason(of_nodes=of_nodes):
            task.stopped_by = reason
            return
        left = task.watch.nodes_left if of_nodes else None
        yield _SLICE if left is None else min(_SLICE, left)
        task.watch.nodes += work.work - charged
        charged = work.work
