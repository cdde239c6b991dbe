"""State of one packing problem during a solve, and the worker thread for kernels without limit checks."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from solvers._core import Cancel
from solvers.packing.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from solvers.packing.jobs import Jobs
    from solvers.packing.portfolio import Portfolio
    from solvers.packing.progress import Budget


@dataclass(eq=False)
class Task:
    """One packing problem and the best offsets found so far.

    Attributes:
        jobs: the jobs to pack.
        budget: limits of the solve.
        seed: seed of the solver's random numbers.
        target: an arena in bytes that is small enough; at least the lower bound.
        capacity: largest useful arena in bytes, or None for no limit.
        threads: number of threads that may search at once.
        on_smaller: called with (offsets, arena) whenever a smaller arena is found.
        offsets: int64[len(jobs)], the best offsets so far, or None.
        arena: arena of `offsets` in bytes.
        portfolio: the portfolio of threads that search at the same time, or None.
        max_load_first_offsets: int64[len(jobs)], the offsets of maximum load first, or None.
        lower_bound: the best known bound in bytes: the jobs' bound, or a larger bound that a solver has
            proven.
        stopped_by: reason why the solver stopped; "" while the solver may continue.
    """

    jobs: Jobs
    budget: Budget
    seed: int = 0
    target: int = 0
    capacity: int | None = None
    threads: int = 1
    on_smaller: Callable[[NDArray[np.int64], int], None] | None = None
    offsets: NDArray[np.int64] | None = None
    arena: int = 0
    portfolio: Portfolio | None = None
    max_load_first_offsets: NDArray[np.int64] | None = None
    lower_bound: int = field(init=False)
    stopped_by: str = ""
    _refuted: bool = False

    def __post_init__(self) -> None:
        self.lower_bound = self.jobs.lower_bound
        self.target = max(self.target, self.lower_bound)

    def offer(self, offsets: NDArray[np.int64], arena: int) -> None:
        """Keep these offsets if their arena is the smallest so far."""
        if self.offsets is not None and arena >= self.arena:
            return
        self.offsets, self.arena = offsets, arena
        if self.on_smaller is not None:
            self.on_smaller(offsets, arena)

    def bound(self, arena: int) -> None:
        """Record that no plan has an arena smaller than `arena`; raise the bound and the target."""
        self.lower_bound = max(self.lower_bound, min(self.jobs.attainable(arena), self.arena))
        self.target = max(self.target, self.lower_bound)

    def refute(self, arena: int) -> None:
        """Record a search's proof that no plan has an arena of at most `arena` bytes."""
        self.bound(arena + 1)
        self._refuted = True

    def done(self, *, check_nodes: bool = True) -> bool:
        """Return whether to stop, and set `stopped_by` to the reason.

        The caller must have added the work so far to the budget. The portfolio's results are collected first,
        so that none is lost at a limit.
        """
        if self.portfolio is not None:
            self.portfolio.share(self)
        limit = self.budget.reached_limit(check_nodes=check_nodes)  # first, because it reports progress
        self.stopped_by = self._good_enough() or limit
        return self.stopped_by != ""

    def _good_enough(self) -> str:
        if self.offsets is None:
            return ""
        if self.capacity is not None and self.lower_bound > self.capacity:
            return "proof"
        if self.arena > max(self.target, self.lower_bound):
            return ""
        if self.arena > self.lower_bound:
            return "target"
        return "proof" if self._refuted else "bound"


T = TypeVar("T")


def run_aside(task: Task, work: Callable[[Cancel], T]) -> T | None:
    """Return the result of the work, or None if a limit was reached first (see `Task.stopped_by`).

    Before the first plan, only Ctrl-C stops the work. Abandoned work ends soon, at the latest when Python
    exits and joins the thread.

    Args:
        task: the task whose limits apply.
        work: called with a cancellation flag; must release the GIL.

    Raises:
        KeyboardInterrupt: the user interrupted the wait.
        Exception: any exception that the work raises.
    """
    cancel = Cancel()
    if len(task.jobs) <= OPTIONS.calling_thread:
        return work(cancel)
    results, errors = list[T](), list[BaseException]()
    ended = threading.Event()  # Ctrl-C in Thread.join() would mark a running thread as ended

    def run() -> None:
        try:
            results.append(work(cancel))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    threading.Thread(target=run, name="packing").start()
    try:
        while not ended.wait(OPTIONS.worker_pause):
            if task.offsets is not None and task.done(check_nodes=False):
                cancel.cancel()
                return None
    except BaseException:
        cancel.cancel()
        raise
    if errors:
        raise errors[0]
    return results[0]
