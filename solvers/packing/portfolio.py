"""Portfolio of worker threads: each searches for better offsets with a separate seed."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, TypeAlias

from solvers import _core
from solvers.packing.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from solvers.packing.task import Task

    #: Function that a worker thread runs with its seed, until the portfolio ends or no work remains.
    Work: TypeAlias = Callable[["Portfolio", int], None]
    _Complete: TypeAlias = _core.SkylineSearch | _core.PairwiseSearch
    _Search: TypeAlias = _core.LocalRepair | _Complete


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Portfolio:
    """Threads that search for better offsets of a task; the native kernels run without the GIL.

    The results depend on the threads' speed, so runs are not reproducible. Threads never access the task;
    `Task.done` collects the results. A caller that starts a portfolio must call `end_portfolio`, even after
    an interrupt.

    Args:
        task: the task to pack; must have offsets. `Task.portfolio` becomes this portfolio.
        work: one function for each thread.

    Attributes:
        jobs: the jobs to pack, for the native kernels.
        best: int64[n], the best known offsets.
        arena: the arena of `best` in bytes.
        target: an arena in bytes that is small enough.
        has_ended: true to end the threads.
    """

    def __init__(self, task: Task, work: Sequence[Work]) -> None:
        assert task.offsets is not None
        self.jobs, self.has_ended = task.jobs.native(), False
        self.best, self.arena, self.target = task.offsets, task.arena, task.target
        self._lock = threading.Lock()
        self._size = task.jobs.size
        self._refuted, self._work = -1, 0
        # Events of the started threads, since Ctrl-C in Thread.join() corrupts the thread's state.
        self._ended = list[threading.Event]()
        task.portfolio = self
        for k, function in enumerate(work):
            seed, ended = (task.seed + (k + 1) * 2**48) % 2**64, threading.Event()
            threading.Thread(target=self._run, args=(function, seed, ended), name=f"packing {k}").start()
            self._ended.append(ended)

    def share(self, task: Task) -> None:
        """Exchange the best offsets and proofs with the task, and charge the work to the task's budget."""
        with self._lock:
            best, arena, refuted = self.best, self.arena, self._refuted
            units, self._work = self._work, 0
        task.budget.nodes += units
        task.offer(best, arena)
        if refuted >= task.lower_bound:
            task.refute(refuted)
        with self._lock:
            self._keep(task.offsets, task.arena)
            self.target = task.target

    def end(self) -> None:
        """Stop the threads, and wait for them: tens of milliseconds."""
        self.has_ended = True
        for ended in self._ended:
            ended.wait()

    def slices(self, search: _Search) -> Iterator[int]:
        """Yield the work units of the next slice until the portfolio ends, and count the units spent."""
        while not self.has_ended:
            before = search.work
            try:
                yield OPTIONS.slice
            finally:  # even if the caller leaves its loop
                with self._lock:
                    self._work += search.work - before

    def offer(self, offsets: NDArray[np.int64]) -> None:
        """Report offsets; keep them if their arena is smaller than the best."""
        arena = int((offsets + self._size).max())
        with self._lock:
            self._keep(offsets, arena)

    def refute(self, capacity: int) -> None:
        """Report a proof that no plan has an arena of `capacity` bytes."""
        with self._lock:
            self._refuted = max(self._refuted, capacity)

    def _keep(self, offsets: NDArray[np.int64] | None, arena: int) -> None:
        if offsets is not None and arena < self.arena:
            self.best, self.arena = offsets, arena

    def _run(self, work: Work, seed: int, ended: threading.Event) -> None:
        try:
            work(self, seed)
        finally:
            ended.set()


def end_portfolio(task: Task) -> None:
    """End the task's portfolio, if the task has one."""
    if task.portfolio is not None:
        task.portfolio.end()
        task.portfolio = None


def repair(portfolio: Portfolio, seed: int) -> None:
    """Repair the best plan locally around the highest job, repeatedly."""
    while not portfolio.has_ended:
        _repair(portfolio, seed)
        seed = (seed + 1) % 2**64


def repair_and_search(portfolio: Portfolio, seed: int) -> None:
    """Alternate local repair with a skyline search halfway between the target and the best arena."""
    _repair_and_decide(
        portfolio, seed, _core.SkylineSearch, lambda: (portfolio.target + portfolio.arena) // 2
    )


def repair_and_pair(portfolio: Portfolio, seed: int) -> None:
    """Alternate local repair with the complete pairwise search at the target."""
    _repair_and_decide(portfolio, seed, _core.PairwiseSearch, lambda: portfolio.target)


def _repair_and_decide(
    portfolio: Portfolio, seed: int, search_type: type[_Complete], capacity: Callable[[], int]
) -> None:
    """Alternate local repair with a complete search of twice the time at each turn."""
    turn = OPTIONS.portfolio_turn
    while not portfolio.has_ended:
        _repair(portfolio, seed)
        _search(portfolio, search_type, capacity(), seed, turn)
        seed, turn = (seed + 1) % 2**64, 2 * turn


def _repair(portfolio: Portfolio, seed: int) -> None:
    search = _core.LocalRepair(portfolio.jobs, portfolio.best, seed)
    for units in portfolio.slices(search):
        if search.work >= OPTIONS.portfolio_turn or not portfolio.target < search.arena <= portfolio.arena:
            return
        if search.advance(units, portfolio.target):
            portfolio.offer(search.offsets)


def _search(portfolio: Portfolio, search_type: type[_Complete], capacity: int, seed: int, turn: int) -> None:
    search = search_type(portfolio.jobs, capacity, seed)
    for units in portfolio.slices(search):
        if search.work >= turn or not portfolio.target <= capacity < portfolio.arena:
            return
        if search.advance(units):
            if search.infeasible:
                portfolio.refute(capacity)
            else:
                portfolio.offer(search.offsets)
            return
