"""Complete searches (branching over skyline valleys, and pairwise order) in turns with the repair heuristics.

A complete search decides whether a plan exists within a capacity. The capacities asked for are the lower
bound, which rises if no plan exists; one just below the best arena, which is optimal if no plan exists; and
some in between, which improve the plan in small steps when the bound is out of reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from solvers import _core
from solvers.packing.greedy import LOOKS_OF_SIDES, can_halve, can_repair, can_stretch, fits
from solvers.packing.peak_outward import Sides
from solvers.packing.portfolio import Crew, end_crew, fill_sides, repair, repair_and_pair, repair_and_search
from solvers.packing.worker_thread import aside

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from solvers.packing.greedy import Order
    from solvers.packing.jobs import Jobs
    from solvers.packing.portfolio import Work
    from solvers.packing.task import Task

_Complete: TypeAlias = _core.SkylineSearch | _core.PairwiseSearch
_Mending: TypeAlias = _core.LocalRepair | _core.OrderSearch | _core.WindowRepair

#: Work units of the kernels between two checks of the limits; up to some ten milliseconds.
_SLICE = 2_000_000
#: Work units of a turn in the first round and at most; each round is twice as long as the round before.
_FIRST = 4_000_000
_LONGEST = 2**40
#: Work units per job with which the search places all jobs at least once; and with which repair treats
#: some places.
_ENOUGH, _LOCALLY = 4_000, 200
#: Largest number of jobs that a complete search soon exhausts; and for the pairwise search on jobs that the
#: skyline search does not take, such as jobs with gaps.
_FEW, _MOST_PAIRED = 60, 300
#: Number of jobs above which repair gains more in a turn than the complete search, and how many times longer
#: the turns of repair then are.
_MANY, _LONGER = 1_000, 4
#: Rounds of the peak-outward heuristic that are enough with at most `_MANY` jobs.
_ROUNDS = 2
#: Number of jobs above which the search over orders is skipped: each try is one pass over all jobs and takes
#: too long.
_MOST_ORDERED = 20_000
#: Largest product of fixed jobs and jobs: the search lists fixed offsets section by section.
_MOST_PINNED = 2**26


def can_branch(jobs: Jobs) -> bool:
    """Return whether the complete skyline search takes these jobs.

    The search takes no jobs with gaps or across the cut of a circle, no sizes that sum to more than the
    kernels can add, and no fixed offsets among very many jobs.
    """
    fixed = jobs.fixed >= 0
    one_piece_each = len(jobs.start) == len(jobs)
    return one_piece_each and int(fixed.sum()) * len(jobs) <= _MOST_PINNED and can_repair(jobs)


def can_pair(jobs: Jobs) -> bool:
    """Return whether the jobs, with or without gaps, are few enough for the pairwise search."""
    most = _FEW if can_branch(jobs) else _MOST_PAIRED
    return len(jobs) <= most and can_repair(jobs)


def take_turns(task: Task, order: Order, nodes: int | None = None) -> None:
    """Improve the task's offsets until the bound, a proof or a limit is reached.

    First and best fit run after the first turn, because the first turn is often the last one and is shorter.

    Args:
        task: the task to pack; must have offsets.
        order: starting point of the search over orders.
        nodes: also stop after about this many nodes; `Task.stopped_by` then stays empty.
    """
    _Turns(task, order).run(nodes)


class _Turns:
    def __init__(self, task: Task, order: Order) -> None:
        self._task, self._native = task, task.jobs.native()
        self._first_order = order
        self._orders: _core.OrderSearch | None = None
        self._searches = 0
        self._kept: dict[str, tuple[int, _Complete]] = {}  # capacity and search of each turn
        self._part = 0.5  # fraction of the gap that the next step is to close
        self._own: _core.LocalRepair | None = None  # repair that began with the maximum-load-first plan
        self._others: _core.LocalRepair | None = None  # repair of plans found by other heuristics
        self._stretches: _core.WindowRepair | None = None
        self._lower: Sides | None = None

    def run(self, nodes: int | None) -> None:
        until = None if nodes is None else self._task.watch.nodes + nodes
        turns = self._turns()
        early, late = self._work_of_others(turns)
        try:
            self._share(early)
            self._begin(turns)
            if self._task.done() or not fits(self._task):
                return
            self._share(late)
            self._in_turn(turns, until)
        finally:
            end_crew(self._task, wait=not early)

    def _share(self, work: list[Work]) -> None:
        if work:
            Crew(self._task, work)

    def _work_of_others(self, turns: list[Callable[[int], None]]) -> tuple[list[Work], list[Work]]:
        """Return the other cores' work from the beginning, and their work after the first turn.

        One of the lists is empty. With few jobs the first turn is often the last, so the other cores start
        after this turn.
        """
        jobs, others = self._task.jobs, self._task.threads - 1
        work: list[Work] = []
        early = len(jobs) > _MANY and self._sides in turns
        if early:
            work.append(fill_sides)
        if len(jobs) <= _MOST_ORDERED and self._repair in turns:
            work += [self._of_others(turns)] * others
        return (work[:others], []) if early else ([], work[:others])

    def _of_others(self, turns: list[Callable[[int], None]]) -> Work:
        if self._target in turns:
            return repair_and_search
        return repair_and_pair if self._pairs in turns else repair

    def _in_turn(self, turns: list[Callable[[int], None]], until: int | None) -> None:
        budget = _FIRST
        while not self._task.done():
            for turn in turns:
                if until is not None and self._task.watch.nodes >= until:
                    return
                turn(budget)
                if self._task.stopped_by:
                    return
            budget = min(2 * budget, _LONGEST)

    def _turns(self) -> list[Callable[[int], None]]:
        jobs = self._task.jobs
        order = [self._order] if len(jobs) <= _MOST_ORDERED else []
        repair = [self._repair] if can_repair(jobs) else []
        if len(jobs) > _MANY and can_stretch(jobs):
            repair.insert(0, self._stretch)
        if can_halve(jobs):
            repair.insert(0, self._sides)
        pairs = [self._pairs_below] if can_pair(jobs) else []
        if can_branch(jobs):
            below = [self._below] if pairs else []
            return [self._target, *below, *pairs, *repair, self._between, *order]
        return [*pairs, *([self._pairs] if pairs else []), *order, *repair] or [self._order]

    def _begin(self, turns: list[Callable[[int], None]]) -> None:
        jobs = self._task.jobs
        if self._stretch in turns and not self._task.done():
            self._stretch(_FIRST)
        if self._repair in turns and len(jobs) > _FEW and not self._task.done():
            self._repair(max(_FIRST // 4, _LOCALLY * len(jobs)))
        if self._target in turns:
            self._target(_FIRST)
        if self._sides in turns and not self._task.done():
            self._sides(LOOKS_OF_SIDES * len(jobs))

    def _target(self, budget: int) -> None:
        """Search for a plan at the target; if no plan exists, the target rises."""
        if budget >= _ENOUGH * len(self._task.jobs):
            self._decide("target", budget, _core.SkylineSearch, lambda: self._task.target)

    def _below(self, budget: int) -> None:
        """Search for a plan smaller than the best by at least one byte."""
        self._decide("below", budget, _core.SkylineSearch, lambda: self._task.arena - 1)

    def _pairs(self, budget: int) -> None:
        self._decide("pairs", budget, _core.PairwiseSearch, lambda: self._task.target)

    def _pairs_below(self, budget: int) -> None:
        self._decide("pairs below", budget, _core.PairwiseSearch, lambda: self._task.arena - 1)

    def _decide(self, turn: str, budget: int, kind: type[_Complete], capacity: Callable[[], int]) -> None:
        """Continue the search of this turn, or start a new search if the capacity has changed."""
        task = self._task
        until = task.watch.nodes + budget
        while not task.stopped_by and (left := until - task.watch.nodes) > 0:
            now = capacity()
            if turn not in self._kept or self._kept[turn][0] != now:
                search = self._search(now, kind)
                if search is None:
                    return
                self._kept[turn] = now, search
            self._branch(self._kept[turn][1], now, left)

    def _between(self, budget: int) -> None:
        """Search for a plan smaller than the best by a step, which adapts to recent success."""
        gap, unit = self._task.arena - self._task.target, self._task.jobs.unit
        step = max(int(gap * self._part) // unit * unit, unit)
        if step < gap and budget >= _ENOUGH * len(self._task.jobs):
            capacity = self._task.arena - step
            search = self._search(capacity)
            if search is None:
                return
            ended = self._branch(search, capacity, budget // 2)
            self._part = min(self._part * 2, 0.5) if ended else self._part / 2

    def _repair(self, budget: int) -> None:
        """Repair plans locally around the highest job, again and again.

        One repair starts from the maximum-load-first plan. If another heuristic's plan has a smaller arena,
        that plan is repaired in half of the time; plans of other orders are often lower at first but improve
        little.
        """
        task = self._task
        budget *= _LONGER if len(task.jobs) > _MANY else 1
        self._own = self._own or self._repair_of(self._by_what_is_alive())
        if self._own is None:
            return
        behind = self._own.arena > task.arena
        self._mend(self._own, budget // 2 if behind else budget)
        if behind and not task.stopped_by and self._own.arena > task.arena:
            if self._others is None or self._others.arena > task.arena:
                self._others = self._repair_of(task.offsets)
            if self._others is not None:
                self._mend(self._others, budget // 2)

    def _stretch(self, budget: int) -> None:
        """Repair windows of the best plan around the highest job, again and again, with `_LONGER` budgets."""
        task, offsets = self._task, self._task.offsets
        assert offsets is not None
        if self._stretches is None or self._stretches.arena > task.arena:
            seed = self._next_seed()
            self._stretches = aside(task, lambda _: _core.WindowRepair(self._native, offsets, seed))
        if self._stretches is not None:
            self._mend(self._stretches, _LONGER * budget)

    def _sides(self, budget: int) -> None:
        """Run the peak-outward heuristic; few jobs get only `_ROUNDS` rounds, as other searches do better."""
        task = self._task
        if self._lower is None:
            self._lower = Sides(self._native, self._next_seed())
        work = self._lower
        if len(task.jobs) <= _MANY and work.rounds >= _ROUNDS:
            return
        self._improve(work, lambda units: work.advance(units, task.target, task.arena), budget)

    def _by_what_is_alive(self) -> NDArray[np.int64] | None:
        task, order = self._task, np.arange(len(self._task.jobs), dtype=np.int32)
        if len(order) > _MOST_ORDERED:  # computing the plan again would take long
            return task.offsets if task.by_what_is_alive is None else task.by_what_is_alive
        return _core.pack_max_load_first(self._native, order, task.target, _core.Cancel())

    def _repair_of(self, offsets: NDArray[np.int64] | None) -> _core.LocalRepair | None:
        task = self._task
        assert offsets is not None
        seed = self._next_seed()
        return aside(task, lambda _: _core.LocalRepair(self._native, offsets, seed))

    def _mend(self, work: _Mending, budget: int) -> None:
        self._improve(work, lambda units: work.advance(units, self._task.target), budget)

    def _improve(self, work: _Mending | Sides, advance: Callable[[int], bool], budget: int) -> None:
        """Advance a heuristic and take over each better plan until the budget is spent.

        The heuristic's initial plan is taken over too: it may be at the target already, and the heuristic
        would then search for nothing.
        """
        task, until = self._task, work.work + budget
        if not task.stopped_by:
            self._take(work)
        while not task.stopped_by and work.work < until:
            if self._spend(work, advance, until - work.work):
                self._take(work)

    def _take(self, work: _Mending | Sides) -> None:
        if work.arena < self._task.arena and (offsets := work.offsets) is not None:
            self._task.offer(offsets, work.arena)
        self._task.done()

    def _order(self, budget: int) -> None:
        task, search = self._task, self._orders
        if search is None:  # the constructor runs a whole pass
            begin, seed = self._first_order(), task.seed % 2**64
            search = self._orders = aside(task, lambda _: _core.OrderSearch(self._native, begin, seed))
            if search is None:
                return
        self._mend(search, budget // 2)

    def _search(self, capacity: int, kind: type[_Complete] = _core.SkylineSearch) -> _Complete | None:
        seed = self._next_seed()
        search = aside(self._task, lambda _: kind(self._native, capacity, seed))
        if search is not None:
            self._task.watch.nodes += search.work
        return search

    def _next_seed(self) -> int:
        self._searches += 1
        return (self._task.seed + self._searches * 2**32) % 2**64

    def _branch(self, search: _Complete, capacity: int, budget: int) -> bool:
        """Advance a complete search; return whether the search ended with a plan or with a better bound."""
        task = self._task
        ended = self._spend(search, search.advance, budget)
        if not ended:
            return False
        if search.found:
            offsets = search.offsets
            task.offer(offsets, int((offsets + task.jobs.size).max()))
        elif search.infeasible:
            task.refute(capacity)
        task.done()
        return True

    def _aside(self, advance: Callable[[int], bool], units: int) -> bool | None:
        """Return whether `advance` found something, or None if a limit was reached first."""
        return aside(self._task, lambda _: advance(units))

    def _spend(self, work: _Complete | _Mending | Sides, advance: Callable[[int], bool], budget: int) -> bool:
        """Advance in slices until something is found; return false when the budget or a limit is reached.

        The length of a slice does not depend on the clock, so a node budget gives the same plan on every
        machine. With very many jobs even one slice takes longer than the delay allowed at a limit: a kernel
        abandoned in the middle keeps running on its thread for a moment, and must not be touched.
        """
        task, until = self._task, work.work + budget
        while (left := until - work.work) > 0:
            nodes, before = task.watch.nodes_left, work.work
            event = self._aside(advance, min(_SLICE, left, left if nodes is None else nodes))
            if event is None:
                return False
            task.watch.nodes += work.work - before
            if event:
                return True
            if task.done():
                return False
        return False
