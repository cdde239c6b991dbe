"""First fit, best fit and lowest valley first, in several orders, then a seeded search over orders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from solvers import _core

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from solvers.jobs import Jobs
    from solvers.task import Task

#: Looks between two glances at the clock; some ten milliseconds.
_SLICE = 10_000_000
#: With more jobs than this, first fit in many orders is left to the search: one pass takes seconds.
_MANY = 30_000


def first_fit(task: Task) -> None:
    """Size-ordered first fit: largest first, ties by earlier start (SmartPool, Zhang et al. 2019)."""
    _one_pass(task, best_fit=False)


def best_fit(task: Task) -> None:
    """Size-ordered best fit, as SmartPool's default but with the gap below the first range."""
    _one_pass(task, best_fit=True)


def greedy(task: Task) -> None:
    """Every native kernel: quick orders first, then a search until the budget is spent.

    Lowest valley first reaches the peak load on most training-shaped work; the search earns its place on
    irregular ones.
    """
    if quick(task):
        _search(task, task.jobs.native())


def quick(task: Task) -> bool:
    """The quick orders only; whether to go on. There is always a plan afterwards."""
    native = task.jobs.native()
    for key in orders(task.jobs).values():
        _offer(task, _core.skyline(native, key))
        task.watch.nodes += len(task.jobs)
        if task.done() or not _compact(task, native):
            return False
    if len(task.jobs) <= _MANY:
        for key in orders(task.jobs).values():
            for rule in (False, True):
                if not _place(task, native, key, best_fit=rule) or task.done():
                    return False
    return True


def orders(jobs: Jobs) -> dict[str, NDArray[np.int32]]:
    """Orders of placement by name, int32[n] each; ties by earlier start."""
    lifetime = jobs.lifetime
    start = jobs.start[jobs.first]
    area = lifetime.astype(np.float64) * jobs.size
    keys = {"lifetime": (-jobs.size, -lifetime), "size": (start, -jobs.size), "area": (start, -area)}
    by_start = {"start": (-jobs.size, -lifetime, start)}
    return {name: np.lexsort(key).astype(np.int32) for name, key in (keys | by_start).items()}


def _one_pass(task: Task, *, best_fit: bool) -> None:
    if _place(task, task.jobs.native(), orders(task.jobs)["size"], best_fit=best_fit, of_nodes=False):
        task.stopped_by = "bound" if task.arena <= task.lower_bound else "finished"


def _place(
    task: Task, native: _core.Jobs, order: NDArray[np.int32], *, best_fit: bool = False, of_nodes: bool = True
) -> bool:
    """One pass over the jobs; whether it came to its end before a limit was reached."""
    packer = _core.Packer(native)
    packer.begin(order, best_fit=best_fit)
    for nodes in _slices(task, packer, of_nodes=of_nodes):
        if packer.advance(nodes):
            task.offer(packer.offsets, packer.arena)
            return True
    return False


def _compact(task: Task, native: _core.Jobs) -> bool:
    """First fit in the order of the best offsets: no job ends higher than it was.

    By induction: below a job's old offset stand only jobs that have not risen, so that offset is still free.
    """
    if len(task.jobs) > _MANY or task.offsets is None:
        return True
    order = np.argsort(task.offsets, kind="stable").astype(np.int32)
    return _place(task, native, order) and not task.done()


def _search(task: Task, native: _core.Jobs) -> None:
    if task.offsets is None:
        return
    search = _core.Search(native, task.offsets, task.arena, task.seed)
    for nodes in _slices(task, search):
        if search.advance(nodes, max(task.target, task.lower_bound)):
            task.offer(search.offsets, search.arena)


def _slices(task: Task, work: _core.Packer | _core.Search, *, of_nodes: bool = True) -> Iterator[int]:
    """Yield nodes to spend until a limit is reached, charging the work done in between to the watch.

    A slice's length does not depend on the clock, so that a budget of nodes gives the same plan everywhere.
    """
    charged = work.looks
    while True:
        if task.offsets is not None and of_nodes:
            if task.done():
                return
        elif reason := task.watch.reason(of_nodes=of_nodes):
            task.stopped_by = reason
            return
        left = task.watch.nodes_left if of_nodes else None
        yield _SLICE if left is None else min(_SLICE, left)
        task.watch.nodes += work.looks - charged
        charged = work.looks


def _offer(task: Task, offsets: NDArray[np.int64]) -> None:
    task.offer(offsets, int((offsets + task.jobs.size).max()))
