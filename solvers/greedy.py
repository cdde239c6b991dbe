"""First fit, best fit and lowest valley first, in several orders, then a seeded search over orders."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers import _core
from solvers.aside import aside
from solvers.crew import Crew, end_crew, fill_sides
from solvers.sides import Sides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from solvers.jobs import Jobs
    from solvers.task import Task

    #: An order of jobs, made when it is wanted: int32[n].
    Order = Callable[[], NDArray[np.int32]]

#: Looks between two glances at the clock; up to some ten milliseconds.
_SLICE = 2_000_000
#: With more jobs than this, first and best fit would take the whole budget: a pass is quadratic.
_MANY = 10_000
#: Of more jobs than this, stretches of time come before the orders that seldom help.
_FEW = 50_000
#: Of more jobs than this, filling all by what is alive takes seconds, and other orders are left out.
_HUGE = 400_000
#: Looks a job of filling by one order, and by what is alive; measured.
_LOOKS_IN_ORDER, _LOOKS_BY_FULLEST = 50, 500
#: Looks for mending stretches of time at most, before anything else is tried, about a second; and at first.
_LOOKS_OF_STRETCHES, _LOOKS_OF_SOME = 2**28, 2**26
#: Part of all that must be alive at the peak for what is alive there to come before all else; measured.
_MUCH = 0.125
#: Looks a job that this may take; measured.
LOOKS_OF_SIDES = 1_500
#: A gap, as a part of the bound, above which filling all of it by what is alive may come lower.
_FAR = 0.01
#: The kernels add up sizes with their padding.
_MOST_BYTES = 2.0**61
#: A gap, as a part of the bound, for which nothing is begun that takes more than is left of the budget.
_NEAR = 1e-4


def greedy(task: Task) -> None:
    """Every native kernel: quick orders first, then a search until the budget is spent.

    Lowest valley first reaches the peak load on most training-shaped work; the search earns its place on
    irregular ones.
    """
    order = quick(task)
    if order is not None:
        _search(task, task.jobs.native(), order())


def quick(task: Task) -> Order | None:
    """The quick orders only: the best, or None if there is no reason to go on.

    There is always a plan afterwards.
    """
    order = valleys(task)
    return order if order is not None and fits(task) else None


def valleys(task: Task) -> Order | None:
    """Valley by valley: the best order to fill them in, or None when there is no reason to go on.

    Earlier starts first, which is quick; from the peak to either side, where much is alive there; by what is
    alive, nearly always the best; stretches of time where there are many jobs; then other orders, where there
    are not very many.
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
    """By what is alive and stretch by stretch, which of very many comes first; whether to go on.

    From the peak to either side on another core, or in between: stretches come to the bound soon or seldom.
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
    """Lowest valley first, by an order; whether there is a reason to go on."""
    native = task.jobs.native()
    return _tried(task, aside(task, lambda cancel: _core.skyline(native, order, cancel)), _LOOKS_IN_ORDER)


def _is_crowded(jobs: Jobs) -> bool:
    """Whether so much is alive at the peak that it comes before all else."""
    return can_halve(jobs) and jobs.native().at_peak >= _MUCH * len(jobs)


def _peak_first(task: Task) -> bool:
    """What is alive at the peak, then either side in order; whether there is a reason to go on."""
    native = task.jobs.native()
    return _tried(task, aside(task, lambda cancel: _core.peak_first(native, cancel)), 2 * _LOOKS_IN_ORDER)


def _by_sides(task: Task) -> bool:
    """What is alive at the peak, and what is left on either side; whether to go on."""
    work = Sides(task.jobs.native(), task.seed % 2**64)
    budget = task.watch.at_most_half(LOOKS_OF_SIDES * len(task.jobs))

    def advance(looks: int) -> bool | None:
        return aside(task, lambda _: work.advance(looks, task.target, task.arena))

    for nodes in _slices(task, work):
        if work.looks >= budget or work.rounds:
            return True
        found = advance(min(nodes, budget - work.looks))
        if found is None:
            return False
        if found and work.offsets is not None:
            task.offer(work.offsets, work.arena)
    return False


def _by_fullest(task: Task, order: NDArray[np.int32]) -> bool:
    """By what is alive, by an order where there are gaps; whether there is a reason to go on."""
    native = task.jobs.native()
    return _tried(
        task,
        aside(task, lambda cancel: _core.fullest(native, order, task.target, cancel)),
        _LOOKS_BY_FULLEST,
    )


def _by_stretches(task: Task, looks: int = _LOOKS_OF_STRETCHES) -> bool:
    """The best so far with stretches of time filled anew where it is highest; whether to go on."""
    native, offsets, seed = task.jobs.native(), task.offsets, task.seed % 2**64
    assert offsets is not None
    work = aside(task, lambda _: _core.Stretches(native, offsets, seed))
    if work is None:
        return False
    budget = task.watch.at_most_half(looks)
    for nodes in _slices(task, work):
        if work.looks >= budget:
            return True
        if work.advance(min(nodes, budget - work.looks), task.target):
            task.offer(work.offsets, work.arena)
    return False


def can_repair(jobs: Jobs) -> bool:
    """Whether parts of a plan can be made lower: not with absurdly many bytes."""
    total = (jobs.size.astype(np.float64) + jobs.alignment).sum() + jobs.fixed.max(initial=0)
    return bool(total <= _MOST_BYTES)


def can_stretch(jobs: Jobs) -> bool:
    """Whether stretches of time are worth filling anew: what cannot move there may be what is highest."""
    return len(jobs.start) == len(jobs) and not (jobs.fixed >= 0).any() and can_repair(jobs)


def can_halve(jobs: Jobs) -> bool:
    """Whether what is alive at the peak can be stacked without a gap."""
    coarsest = int(jobs.alignment.max(initial=1))
    return can_stretch(jobs) and (coarsest == 1 or not (jobs.size % coarsest).any())


def _tried(task: Task, offsets: NDArray[np.int64] | None, looks: int) -> bool:
    """Offer what came of it, if anything, and charge it; whether there is a reason to go on."""
    if offsets is None:
        return False
    task.offer(offsets, int((offsets + task.jobs.size).max()))
    task.watch.nodes += task.watch.at_most_half(looks * len(task.jobs))
    return not task.done(of_nodes=False)


def _near_enough(task: Task) -> bool:
    """Whether what is still to be gained is little, and costs more than is left of the budget.

    So it is where very many jobs reach the bound but for some bytes. Where the caller wants an arena, it is
    not little.
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
    """First and best fit in each order; whether to go on.

    The first order is that of the best offsets so far. In it, first fit puts no job higher than it was: below
    its old offset stand only jobs that have not risen, so that offset is still free.
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
    """Orders of placement by name, as functions that make them, int32[n]; the quickest to pack by first."""

    def start() -> NDArray[np.int64]:
        return jobs.start[jobs.first]

    def area() -> NDArray[np.float64]:
        return jobs.lifetime.astype(np.float64) * jobs.size

    def by(*keys: NDArray[Any]) -> NDArray[np.int32]:
        return np.lexsort(keys).astype(np.int32)

    def by_start() -> NDArray[np.int32]:
        # The native one is quicker, and does without the lifetimes of those across the cut of a circle.
        return jobs.native().earliest_first if len(jobs) > _FEW else by(-jobs.size, -jobs.lifetime, start())

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
    """One pass over the jobs; whether it came to its end before a limit was reached."""
    packer = _core.Packer(native)
    packer.begin(order, best_fit=best_fit, inner=inner)
    for nodes in _slices(task, packer, of_nodes=of_nodes):
        if packer.advance(nodes):
            task.offer(packer.offsets, packer.arena)
            return True
    return False


def _search(task: Task, native: _core.Jobs, order: NDArray[np.int32]) -> None:
    search = _core.Search(native, order, task.seed % 2**64)
    task.offer(search.offsets, search.arena)  # which may be the target: then it would look for nothing
    for nodes in _slices(task, search):
        if search.advance(nodes, max(task.target, task.lower_bound)):
            task.offer(search.offsets, search.arena)


def _slices(
    task: Task, work: _core.Packer | _core.Search | _core.Stretches | Sides, *, of_nodes: bool = True
) -> Iterator[int]:
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
