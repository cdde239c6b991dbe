"""Complete searches (branching over skyline valleys, and pairwise order) that alternate with local repair.

A complete search decides whether a plan exists within a capacity. Two capacities are tried: the lower bound,
which rises if no plan exists, and a byte less than the best arena, which is optimal if no plan exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from solvers import _core
from solvers.packing.greedy import can_repair, run_fits
from solvers.packing.options import OPTIONS
from solvers.packing.portfolio import (
    Portfolio,
    end_portfolio,
    repair,
    repair_and_pair,
    repair_and_search,
)
from solvers.packing.task import run_aside

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from solvers.packing.jobs import Jobs
    from solvers.packing.portfolio import Work
    from solvers.packing.task import Task

_Complete: TypeAlias = _core.SkylineSearch | _core.PairwiseSearch


def can_search_skyline(jobs: Jobs) -> bool:
    """Return whether the complete skyline search takes these jobs.

    The search excludes jobs with gaps or across the cut of a circle, sizes whose sum exceeds the kernels'
    integers, and fixed offsets among very many jobs.
    """
    fixed = jobs.fixed >= 0
    one_piece_each = len(jobs.start) == len(jobs)
    return one_piece_each and int(fixed.sum()) * len(jobs) <= OPTIONS.fixed_sections and can_repair(jobs)


def can_search_pairs(jobs: Jobs) -> bool:
    """Return whether the jobs are few enough for the pairwise search, which permits gaps."""
    most = OPTIONS.few if can_search_skyline(jobs) else OPTIONS.pairwise
    return len(jobs) <= most and can_repair(jobs)


class TurnSearch:
    """Alternating searches of one task: complete searches, repairs and heuristics.

    First and best fit run after the first turn, because the first turn is shorter and often the last.

    Args:
        task: the task to pack; must have offsets.
    """

    def __init__(self, task: Task) -> None:
        self._task, self._native = task, task.jobs.native()
        self._seeds = 0
        self._searches: dict[str, tuple[int, _Complete]] = {}  # capacity and search of each turn
        self._max_load_repair: _core.LocalRepair | None = None  # starts from the maximum-load-first plan
        self._best_repair: _core.LocalRepair | None = None  # starts from plans of other heuristics

    def run(self) -> None:
        """Search until the bound, a proof or a limit is reached."""
        turns = self._turns()
        if not turns:
            self._task.stopped_by = "finished"
            return
        self._begin(turns)
        if self._task.done() or not run_fits(self._task):
            return
        try:
            others = self._task.threads - 1
            if others and self._repair in turns and len(self._task.jobs) <= OPTIONS.helped_repair:
                Portfolio(self._task, [self._helper_work(turns)] * others)
            self._in_turn(turns)
        finally:
            end_portfolio(self._task)

    def _helper_work(self, turns: list[Callable[[int], None]]) -> Work:
        if self._target in turns:
            return repair_and_search
        return repair_and_pair if self._pairs in turns else repair

    def _in_turn(self, turns: list[Callable[[int], None]]) -> None:
        budget = OPTIONS.first_turn
        medium = OPTIONS.few < len(self._task.jobs) <= OPTIONS.many
        while not self._task.done():
            for turn in turns:
                long = medium and turn in (self._target, self._halfway)
                turn(budget * OPTIONS.long_search if long else budget)
                if self._task.stopped_by:
                    return
            budget = min(2 * budget, OPTIONS.longest_turn)

    def _turns(self) -> list[Callable[[int], None]]:
        jobs = self._task.jobs
        repair = [self._repair] if can_repair(jobs) else []
        pairs = [self._pairs_below] if can_search_pairs(jobs) else []
        if can_search_skyline(jobs):
            below = self._below if pairs else self._halfway
            return [self._target, below, *pairs, *repair]
        return [*pairs, *([self._pairs] if pairs else []), *repair]

    def _begin(self, turns: list[Callable[[int], None]]) -> None:
        jobs = self._task.jobs
        if self._target in turns:
            self._target(OPTIONS.first_turn)
        if self._repair in turns and len(jobs) > OPTIONS.few and not self._task.done():
            self._repair(max(OPTIONS.first_turn // 4, OPTIONS.local_repair_work * len(jobs)))

    def _target(self, budget: int) -> None:
        """Search for a plan at the target; raise the target if no plan exists."""
        if budget >= OPTIONS.skyline_search_work * len(self._task.jobs):
            self._decide("target", budget, _core.SkylineSearch, lambda: self._task.target)

    def _halfway(self, budget: int) -> None:
        """Search for a plan halfway between the target and the best plan, unless a capacity is given."""
        task = self._task
        if task.capacity is None and budget >= OPTIONS.skyline_search_work * len(task.jobs):
            self._decide("halfway", budget, _core.SkylineSearch, lambda: (task.target + task.arena) // 2)

    def _below(self, budget: int) -> None:
        """Search for a plan at least one byte smaller than the best plan."""
        self._decide("below", budget, _core.SkylineSearch, lambda: self._task.arena - 1)

    def _pairs(self, budget: int) -> None:
        self._decide("pairs", budget, _core.PairwiseSearch, lambda: self._task.target)

    def _pairs_below(self, budget: int) -> None:
        self._decide("pairs below", budget, _core.PairwiseSearch, lambda: self._task.arena - 1)

    def _decide(
        self, turn: str, budget: int, search_type: type[_Complete], capacity: Callable[[], int]
    ) -> None:
        """Continue the search of this turn, or start a new search if the capacity has changed."""
        task = self._task
        until = task.budget.nodes + budget
        while not task.stopped_by and (left := until - task.budget.nodes) > 0:
            now = capacity()
            if turn not in self._searches or self._searches[turn][0] != now:
                search = self._new_search(search_type, now)
                if search is None:
                    return
                self._searches[turn] = now, search
            search = self._searches[turn][1]
            if self._spend(search, search.advance, left):
                if search.found:
                    task.offer(search.offsets, int((search.offsets + task.jobs.size).max()))
                elif search.infeasible:
                    task.refute(now)
                task.done()

    def _new_search(self, search_type: type[_Complete], capacity: int) -> _Complete | None:
        seed = self._next_seed()
        search = run_aside(self._task, lambda _: search_type(self._native, capacity, seed))
        if search is not None:
            self._task.budget.nodes += search.work
        return search

    def _repair(self, budget: int) -> None:
        """Repair plans locally around the highest job, repeatedly.

        One repair starts from the maximum-load-first plan. If another heuristic's plan has a smaller arena,
        half of the time goes to that plan: such plans often start lower, but improve little.
        """
        task = self._task
        budget *= OPTIONS.long_repair if len(task.jobs) > OPTIONS.many else 1
        self._max_load_repair = self._max_load_repair or self._repair_of(task.max_load_first_offsets)
        if self._max_load_repair is None:
            return
        behind = self._max_load_repair.arena > task.arena
        self._improve_plan(self._max_load_repair, budget // 2 if behind else budget)
        if behind and not task.stopped_by and self._max_load_repair.arena > task.arena:
            if self._best_repair is None or self._best_repair.arena > task.arena:
                self._best_repair = self._repair_of(task.offsets)
            if self._best_repair is not None:
                self._improve_plan(self._best_repair, budget // 2)

    def _repair_of(self, offsets: NDArray[np.int64] | None) -> _core.LocalRepair | None:
        task = self._task
        assert offsets is not None
        seed = self._next_seed()
        return run_aside(task, lambda _: _core.LocalRepair(self._native, offsets, seed))

    def _improve_plan(self, search: _core.LocalRepair, budget: int) -> None:
        """Repair until the budget is spent, and offer each better plan to the task.

        The initial plan is offered, too, since it may already reach the target.
        """
        task, until = self._task, search.work + budget
        if not task.stopped_by:
            self._take(search)
        while not task.stopped_by and search.work < until:
            if self._spend(search, lambda units: search.advance(units, task.target), until - search.work):
                self._take(search)

    def _take(self, search: _core.LocalRepair) -> None:
        if search.arena < self._task.arena:
            self._task.offer(search.offsets, search.arena)
        self._task.done()

    def _next_seed(self) -> int:
        self._seeds += 1
        return (self._task.seed + self._seeds * 2**32) % 2**64

    def _run_aside(self, advance: Callable[[int], bool], units: int) -> bool | None:
        """Return the result of `advance`, or None if a limit was reached first."""
        return run_aside(self._task, lambda _: advance(units))

    def _spend(
        self, search: _Complete | _core.LocalRepair, advance: Callable[[int], bool], budget: int
    ) -> bool:
        """Advance in slices until a plan or proof is found; return false at the budget or a limit.

        The length of a slice does not depend on the clock, so a node budget gives the same plan on every
        machine. With very many jobs even one slice exceeds the permitted delay at a limit: an abandoned
        kernel then still runs briefly on its thread, and must not be touched.
        """
        task, until = self._task, search.work + budget
        while (left := until - search.work) > 0:
            nodes, before = task.budget.nodes_left, search.work
            event = self._run_aside(advance, min(OPTIONS.slice, left, left if nodes is None else nodes))
            if event is None:
                return False
            task.budget.nodes += search.work - before
            if event:
                return True
            if task.done():
                return False
        return False
