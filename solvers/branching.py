"""The complete searches, in the valleys of the skyline and pair by pair, taking turns with the others.

They decide whether there is a plan within a capacity. So they are asked for one at the lower bound, which is
raised when there is none, for one just below the best so far, which is the smallest when there is none, and
for some in between, which bring a better plan in small steps where the bound is out of reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from solvers import _core
from solvers.aside import aside
from solvers.crew import Crew, end_crew, fill_sides, repair, repair_and_pair, repair_and_search
from solvers.greedy import LOOKS_OF_SIDES, can_halve, can_repair, can_stretch, fits
from solvers.sides import Sides

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from solvers.crew import Work
    from solvers.greedy import Order
    from solvers.jobs import Jobs
    from solvers.task import Task

_Complete: TypeAlias = _core.Branching | _core.Pairs
_Mending: TypeAlias = _core.Repair | _core.Search | _core.Stretches

#: Looks between two glances at the clock; up to some ten milliseconds.
_SLICE = 2_000_000
#: Looks of the first turn. Each round is twice as long as the one before.
_FIRST = 4_000_000
_LONGEST = 2**40
#: Looks a job with which the search comes to the top at least once; and with which some places are repaired.
_ENOUGH, _LOCALLY = 4_000, 200
#: So few jobs are soon searched through; of jobs of several pieces more are searched pair by pair.
_FEW, _MOST_PAIRED = 60, 300
#: Of more, repair makes more in a turn than the complete search, and has turns so many times as long.
_MANY, _LONGER = 1_000, 4
#: Of no more, so many rounds from the peak to either side are enough.
_ROUNDS = 2
#: Of more, a try of the search over orders, which is one pass over all, takes too long.
_MOST_ORDERED = 20_000
#: The search lists fixed offsets section by section.
_MOST_PINNED = 2**26


def can_branch(jobs: Jobs) -> bool:
    """Whether the complete search takes these jobs: none with gaps, or across the cut of a circle.

    Nor absurdly many bytes, or fixed offsets among very many jobs.
    """
    fixed = jobs.fixed >= 0
    one_piece_each = len(jobs.start) == len(jobs)
    return one_piece_each and int(fixed.sum()) * len(jobs) <= _MOST_PINNED and can_repair(jobs)


def can_pair(jobs: Jobs) -> bool:
    """Whether the complete search for who is below takes these jobs, and is of use: so few, of any kind."""
    most = _FEW if can_branch(jobs) else _MOST_PAIRED
    return len(jobs) <= most and can_repair(jobs)


def take_turns(task: Task, order: Order, nodes: int | None = None) -> None:
    """Improve on the task's offsets until the bound is reached, all is proven or a limit is reached.

    First and best fit come after the first turn, which is often the last and not as long as they take.

    Args:
        task: what to pack; it has offsets.
        order: where the search over orders begins.
        nodes: after about so many it ends, too; the task is then not stopped by anything.
    """
    _Turns(task, order).run(nodes)


class _Turns:
    def __init__(self, task: Task, order: Order) -> None:
        self._task, self._native = task, task.jobs.native()
        self._first_order = order
        self._orders: _core.Search | None = None
        self._searches = 0
        self._kept: dict[str, tuple[int, _Complete]] = {}  # the search of each turn, and its capacity
        self._part = 0.5  # of the gap, that the next step is to close
        self._own: _core.Repair | None = None  # which began by what is alive
        self._others: _core.Repair | None = None  # which mends what others found
        self._stretches: _core.Stretches | None = None
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
        """What the other cores do from the beginning, or where the first turn is often the last, after it."""
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
        """A plan as small as it need be; where there is none, the target rises."""
        if budget >= _ENOUGH * len(self._task.jobs):
            self._decide("target", budget, _core.Branching, lambda: self._task.target)

    def _below(self, budget: int) -> None:
        """A plan smaller than the best, by however little."""
        self._decide("below", budget, _core.Branching, lambda: self._task.arena - 1)

    def _pairs(self, budget: int) -> None:
        self._decide("pairs", budget, _core.Pairs, lambda: self._task.target)

    def _pairs_below(self, budget: int) -> None:
        self._decide("pairs below", budget, _core.Pairs, lambda: self._task.arena - 1)

    def _decide(self, turn: str, budget: int, kind: type[_Complete], capacity: Callable[[], int]) -> None:
        """Go on with the turn's search for a capacity, with another when that has changed."""
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
        """A plan somewhat smaller than the best; the step is as large as has paid lately."""
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
        """Plans that are lower at their highest place, again and again.

        One that began by what is alive, and, while another is lower, that one in half of the time: those that
        come of other orders are often lower at first, and lead nowhere.
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
        """The best plan, lower at its highest stretch of time, again and again; as long as for repair."""
        task, offsets = self._task, self._task.offsets
        assert offsets is not None
        if self._stretches is None or self._stretches.arena > task.arena:
            seed = self._next_seed()
            self._stretches = aside(task, lambda _: _core.Stretches(self._native, offsets, seed))
        if self._stretches is not None:
            self._mend(self._stretches, _LONGER * budget)

    def _sides(self, budget: int) -> None:
        """From the peak to either side; of few jobs, which others search better, some rounds only."""
        task = self._task
        if self._lower is None:
            self._lower = Sides(self._native, self._next_seed())
        work = self._lower
        if len(task.jobs) <= _MANY and work.rounds >= _ROUNDS:
            return
        self._improve(work, lambda looks: work.advance(looks, task.target, task.arena), budget)

    def _by_what_is_alive(self) -> NDArray[np.int64] | None:
        task, order = self._task, np.arange(len(self._task.jobs), dtype=np.int32)
        if len(order) > _MOST_ORDERED:  # it would take long again
            return task.offsets if task.by_what_is_alive is None else task.by_what_is_alive
        return _core.fullest(self._native, order, task.target, _core.Cancel())

    def _repair_of(self, offsets: NDArray[np.int64] | None) -> _core.Repair | None:
        task = self._task
        assert offsets is not None
        seed = self._next_seed()
        return aside(task, lambda _: _core.Repair(self._native, offsets, seed))

    def _mend(self, work: _Mending, budget: int) -> None:
        self._improve(work, lambda looks: work.advance(looks, self._task.target), budget)

    def _improve(self, work: _Mending | Sides, advance: Callable[[int], bool], budget: int) -> None:
        """Take what is found, again and again, until the budget is spent.

        Also what it begins with: that may be the target already, where it would look for nothing.
        """
        task, until = self._task, work.looks + budget
        if not task.stopped_by:
            self._take(work)
        while not task.stopped_by and work.looks < until:
            if self._spend(work, advance, until - work.looks):
                self._take(work)

    def _take(self, work: _Mending | Sides) -> None:
        if work.arena < self._task.arena and (offsets := work.offsets) is not None:
            self._task.offer(offsets, work.arena)
        self._task.done()

    def _order(self, budget: int) -> None:
        task, search = self._task, self._orders
        if search is None:  # it begins with a whole pass
            begin, seed = self._first_order(), task.seed % 2**64
            search = self._orders = aside(task, lambda _: _core.Search(self._native, begin, seed))
            if search is None:
                return
        self._mend(search, budget // 2)

    def _search(self, capacity: int, kind: type[_Complete] = _core.Branching) -> _Complete | None:
        seed = self._next_seed()
        search = aside(self._task, lambda _: kind(self._native, capacity, seed))
        if search is not None:
            self._task.watch.nodes += search.looks
        return search

    def _next_seed(self) -> int:
        self._searches += 1
        return (self._task.seed + self._searches * 2**32) % 2**64

    def _branch(self, search: _Complete, capacity: int, budget: int) -> bool:
        """Whether the search came to an end: with a plan, or with a better bound."""
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

    def _aside(self, advance: Callable[[int], bool], looks: int) -> bool | None:
        """Whether something was found; None where a limit was reached meanwhile."""
        return aside(self._task, lambda _: advance(looks))

    def _spend(self, work: _Complete | _Mending | Sides, advance: Callable[[int], bool], budget: int) -> bool:
        """Advance in slices until something is found; False when the budget is spent or a limit is reached.

        A slice's length does not depend on the clock, so that a budget of nodes gives the same plan
        everywhere. Of very many jobs the smallest part of a search takes longer than a limit may wait: what
        is given up in the middle goes on for a moment, and must not be touched.
        """
        task, until = self._task, work.looks + budget
        while (left := until - work.looks) > 0:
            nodes, before = task.watch.nodes_left, work.looks
            event = self._aside(advance, min(_SLICE, left, left if nodes is None else nodes))
            if event is None:
                return False
            task.watch.nodes += work.looks - before
            if event:
                return True
            if task.done():
                return False
        return False
