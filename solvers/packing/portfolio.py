"""Portfolio of worker threads, each searching for better offsets with its own seed until one suffices."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, TypeAlias

from solvers import _core
from solvers.packing.peak_outward import Sides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from solvers.packing.task import Task

    #: Function that one worker thread runs with its seed, until the crew is over or no work is left.
    Work: TypeAlias = Callable[["Crew", int], None]
    _Complete: TypeAlias = _core.SkylineSearch | _core.PairwiseSearch
    _Looking: TypeAlias = _core.LocalRepair | _Complete | Sides

#: Work units of the kernels between two checks of the shared state; up to some ten milliseconds.
_SLICE = 2_000_000
#: Work units of one turn of repair or of the complete search for the target, before the worker switches.
_TURN = 40_000_000


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Crew:
    """Threads that search for better offsets of a task; the native kernels run without the GIL.

    The results depend on the threads' speed, so runs are not reproducible. The threads never touch the task:
    `Task.done` takes over the results. The caller that starts a crew must call `end_crew`, even after an
    interrupt.

    Args:
        task: the task to pack; must have offsets. `Task.others` becomes this crew.
        work: one function for each thread.

    Attributes:
        jobs: the jobs to pack, for the native kernels.
        best: int64[n], the best known offsets.
        arena: the arena of `best` in bytes.
        target: an arena in bytes that is small enough.
        over: true when the threads are to end.
    """

    def __init__(self, task: Task, work: Sequence[Work]) -> None:
        assert task.offsets is not None
        self.jobs, self.over = task.jobs.native(), False
        self.best, self.arena, self.target = task.offsets, task.arena, task.target
        self._lock = threading.Lock()
        self._size = task.jobs.size
        self._refuted, self._work = -1, 0
        # Events of the started threads, since Ctrl-C does harm in Thread.join().
        self._ended = list[threading.Event]()
        task.others = self
        for k, one in enumerate(work):
            seed, ended = (task.seed + (k + 1) * 2**48) % 2**64, threading.Event()
            threading.Thread(target=self._run, args=(one, seed, ended), name=f"packing {k}").start()
            self._ended.append(ended)

    def share(self, task: Task) -> None:
        """Exchange best offsets and proofs with the task, and charge the crew's work to the task's watch."""
        with self._lock:
            best, arena, refuted = self.best, self.arena, self._refuted
            units, self._work = self._work, 0
        task.watch.nodes += units
        task.offer(best, arena)
        if refuted >= task.lower_bound:
            task.refute(refuted)
        with self._lock:
            self._keep(task.offsets, task.arena)
            self.target = task.target

    def end(self, *, wait: bool = True) -> None:
        """Stop the threads and wait for them: some ten milliseconds, with very many jobs some hundred."""
        self.over = True
        for ended in self._ended if wait else []:
            ended.wait()

    def slices(self, work: _Looking) -> Iterator[int]:
        """Yield work units to spend until the crew is over, and count the units spent."""
        while not self.over:
            before = work.work
            try:
                yield _SLICE
            finally:  # also when the caller leaves its loop
                with self._lock:
                    self._work += work.work - before

    def found(self, offsets: NDArray[np.int64]) -> None:
        """Report offsets, kept if their arena is smaller than the best."""
        arena = int((offsets + self._size).max())
        with self._lock:
            self._keep(offsets, arena)

    def refuted(self, capacity: int) -> None:
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


def end_crew(task: Task, *, wait: bool) -> None:
    """End the task's crew, if the task has one."""
    if task.others is not None:
        task.others.end(wait=wait)
        task.others = None


def repair(crew: Crew, seed: int) -> None:
    """Repair the best plan locally, around the highest job, again and again."""
    while not crew.over:
        _repair(crew, seed)
        seed = (seed + 1) % 2**64


def repair_and_search(crew: Crew, seed: int) -> None:
    """Alternate local repair with the complete skyline search for the target."""
    while not crew.over:
        _repair(crew, seed)
        _search(crew, _core.SkylineSearch, seed, _TURN)
        seed = (seed + 1) % 2**64


def repair_and_pair(crew: Crew, seed: int) -> None:
    """Alternate local repair with the complete pairwise search, whose time doubles at each turn."""
    turn = _TURN
    while not crew.over:
        _repair(crew, seed)
        _search(crew, _core.PairwiseSearch, seed, turn)
        seed, turn = (seed + 1) % 2**64, 2 * turn


def fill_sides(crew: Crew, seed: int) -> None:
    """Alternate rounds of the peak-outward heuristic with local repair of the best plan."""
    work = Sides(crew.jobs, seed)
    while not crew.over:
        rounds = work.rounds
        for units in crew.slices(work):
            if work.rounds > rounds:
                break
            if work.advance(units, crew.target, crew.arena) and work.offsets is not None:
                crew.found(work.offsets)
        seed = (seed + 1) % 2**64
        _repair(crew, seed)


def _repair(crew: Crew, seed: int) -> None:
    work = _core.LocalRepair(crew.jobs, crew.best, seed)
    for units in crew.slices(work):
        if work.work >= _TURN or not crew.target < work.arena <= crew.arena:
            return
        if work.advance(units, crew.target):
            crew.found(work.offsets)


def _search(crew: Crew, kind: type[_Complete], seed: int, turn: int) -> None:
    capacity = crew.target
    work = kind(crew.jobs, capacity, seed)
    for units in crew.slices(work):
        if work.work >= turn or crew.target != capacity:
            return
        if work.advance(units):
            if work.infeasible:
                crew.refuted(capacity)
            else:
                crew.found(work.offsets)
            return
