"""First fit, best fit and lowest valley first, in several orders, then a seeded search over orders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from solvers import _core
from solvers.aside import aside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from solvers.jobs import Jobs
    from solvers.task import Task

#: Looks between two glances at the clock; some ten milliseconds.
_SLICE = 10_000_000
#: With more jobs than this, first and best fit would take the whole budget: a pass is quadratic.
_MANY = 10_000
#: With more jobs than this, the orders that seldom help are left out.
_FEW = 50_000


def greedy(task: Task) -> None:
    """Every native kernel: quick orders first, then a search until the budget is spent.

    Lowest valley first reaches the peak load on most training-shaped work; the search earns its place on
    irregular ones.
    """
    order = quick(task)
    if order is not None:
        _search(task, task.jobs.native(), order)


def quick(task: Task) -> NDArray[np.int32] | None:
    """The quick orders only: the best, or None if there is no reason to go on.

    There is always a plan afterwards.
    """
    order = valleys(task)
    return order if order is not None and fits(task) else None


def valleys(task: Task) -> NDArray[np.int32] | None:
    """Valley by valley: the best order to fill them in, or None when there is no reason to go on.

    Earlier starts first, which is quick; by what is alive, nearly always the best; then other orders.
    """
    jobs, native = task.jobs, task.jobs.native()
    best: NDArray[np.int32] | None = None
    smallest = 0

    def tried(order: NDArray[np.int32], offsets: NDArray[np.int64] | None) -> bool:
        nonlocal best, smallest
        if offsets is None:
            return True
        arena = int((offsets + jobs.size).max())
        if best is None or arena < smallest:
            best, smallest = order, arena
        task.offer(offsets, arena)
        task.watch.nodes += len(jobs)
        return task.done(of_nodes=False)

    names = orders(jobs)
    first = names.pop("start")()
    if tried(first, aside(task, lambda cancel: _core.skyline(native, first, cancel))):
        return None
    fullest = aside(task, lambda cancel: _core.fullest(native, first, task.target, cancel))
    if fullest is None or tried(np.argsort(fullest, kind="stable").astype(np.int32), fullest):
        return None
    if len(jobs) <= _FEW:
        for order in names.values():
            by = order()
            if tried(by, aside(task, lambda cancel, by=by: _core.skyline(native, by, cancel))):  # type: ignore[misc]
                return None
    return best


def fits(task: Task) -> bool:
    """First and best fit in each order; whether to go on.

    The first order is that of the best offsets so far. In it, first fit puts no job higher than it was: below
    its old offset stand only jobs that have not risen, so that offset is still free.
    """
    native = task.jobs.native()
    if task.offsets is not None and len(task.jobs) <= _FEW:
        down = np.argsort(task.offsets, kind="stable").astype(np.int32)
        if not place(task, native, down):
            return False
    if len(task.jobs) <= _MANY:
        for order in orders(task.jobs).values():
            for rule in (False, True):
                if not place(task, native, order(), best_fit=rule):
                    return False
    return not task.done()


def orders(jobs: Jobs) -> dict[str, Callable[[], NDArray[np.int32]]]:
    """Orders of placement by name, as functions that make them, int32[n]; the quickest to pack by first."""
    lifetime = jobs.lifetime
    start = jobs.start[jobs.first]
    area = lifetime.astype(np.float64) * jobs.size

    def by(*keys: NDArray[Any]) -> Callable[[], NDArray[np.int32]]:
        return lambda: np.lexsort(keys).astype(np.int32)

    def by_start() -> NDArray[np.int32]:
        if (start[1:] > start[:-1]).all():  # as they come
            return np.arange(len(jobs), dtype=np.int32)
        return by(-jobs.size, -lifetime, start)()

    return {
        "start": by_start,
        "size": by(start, -jobs.size),
        "area": by(start, -area),
        "lifetime": by(-jobs.size, -lifetime),
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
    """One pass over the jobs; whether it came to its end before a limit was reached."""
    packer = _core.Packer(native)
    packer.begin(order, best_fit=best_fit, inner=inner)
    for nodes in _slices(task, packer, of_nodes=of_nodes):
        if packer.advance(nodes):
            task.offer(packer.offsets, packer.arena)
            return True
    return False


def _search(task: Task, native: _core.Jobs, order: NDArray[np.int32]) -> None:
    search = _core.Search(native, order, task.seed)
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
