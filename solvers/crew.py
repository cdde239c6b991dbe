"""The other cores: each looks for better offsets with a seed of its own, until one is good enough."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, TypeAlias

from solvers import _core
from solvers.sides import Sides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from solvers.task import Task

    #: What one of them does with a seed, until the crew is over or there is nothing left to do.
    Work: TypeAlias = Callable[["Crew", int], None]
    _Complete: TypeAlias = _core.Branching | _core.Pairs
    _Looking: TypeAlias = _core.Repair | _Complete | Sides

#: Looks between two glances at what the others have found; up to some ten milliseconds.
_SLICE = 2_000_000
#: Looks at the target before plans are repaired again.
_TURN = 40_000_000


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Crew:
    """Threads that look for better offsets of a task; their native work does without the interpreter's lock.

    What they find depends on how fast they are. They never touch the task: it takes what they have found when
    it is asked whether to stop. Whoever begins a crew calls `end_crew`, also if that was interrupted.

    Args:
        task: what to pack; it has offsets, and these are its others from now on.
        work: what each does.

    Attributes:
        jobs: what to pack.
        best: int64[n], the best offsets that are known.
        arena: their arena.
        target: an arena that is small enough.
        over: whether to end.
    """

    def __init__(self, task: Task, work: Sequence[Work]) -> None:
        assert task.offsets is not None
        self.jobs, self.over = task.jobs.native(), False
        self.best, self.arena, self.target = task.offsets, task.arena, task.target
        self._lock = threading.Lock()
        self._size = task.jobs.size
        self._refuted, self._looks = -1, 0
        self._ended = list[threading.Event]()  # of those that began; Ctrl-C does harm in Thread.join()
        task.others = self
        for k, one in enumerate(work):
            seed, ended = (task.seed + (k + 1) * 2**48) % 2**64, threading.Event()
            threading.Thread(target=self._run, args=(one, seed, ended), name=f"packing {k}").start()
            self._ended.append(ended)

    def share(self, task: Task) -> None:
        """Give the task what the crew has found, and the crew what is known of the task; count their work."""
        with self._lock:
            best, arena, refuted = self.best, self.arena, self._refuted
            looks, self._looks = self._looks, 0
        task.watch.nodes += looks
        task.offer(best, arena)
        if refuted >= task.lower_bound:
            task.refute(refuted)
        with self._lock:
            self._keep(task.offsets, task.arena)
            self.target = task.target

    def end(self, *, wait: bool = True) -> None:
        """Stop and wait for the threads; some ten milliseconds, of very many jobs some hundred."""
        self.over = True
        for ended in self._ended if wait else []:
            ended.wait()

    def slices(self, work: _Looking) -> Iterator[int]:
        """Yield looks to spend until the crew is over, counting those that are spent."""
        while not self.over:
            before = work.looks
            try:
                yield _SLICE
            finally:  # also where the caller leaves its loop
                with self._lock:
                    self._looks += work.looks - before

    def found(self, offsets: NDArray[np.int64]) -> None:
        """Offsets that may be better."""
        arena = int((offsets + self._size).max())
        with self._lock:
            self._keep(offsets, arena)

    def refuted(self, capacity: int) -> None:
        """There is no plan with an arena of this size."""
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
    """End the task's others, if there are any."""
    if task.others is not None:
        task.others.end(wait=wait)
        task.others = None


def repair(crew: Crew, seed: int) -> None:
    """Make the best plan lower, place by place."""
    while not crew.over:
        _repair(crew, seed)
        seed = (seed + 1) % 2**64


def repair_and_search(crew: Crew, seed: int) -> None:
    """The same, in turns with the complete search for the target."""
    while not crew.over:
        _repair(crew, seed)
        _search(crew, _core.Branching, seed, _TURN)
        seed = (seed + 1) % 2**64


def repair_and_pair(crew: Crew, seed: int) -> None:
    """The same, with the search pair by pair, which has more time at each turn."""
    turn = _TURN
    while not crew.over:
        _repair(crew, seed)
        _search(crew, _core.Pairs, seed, turn)
        seed, turn = (seed + 1) % 2**64, 2 * turn


def fill_sides(crew: Crew, seed: int) -> None:
    """From the peak to either side, and each time that has come to its end, place by place."""
    work = Sides(crew.jobs, seed)
    while not crew.over:
        rounds = work.rounds
        for looks in crew.slices(work):
            if work.rounds > rounds:
                break
            if work.advance(looks, crew.target, crew.arena) and work.offsets is not None:
                crew.found(work.offsets)
        seed = (seed + 1) % 2**64
        _repair(crew, seed)


def _repair(crew: Crew, seed: int) -> None:
    work = _core.Repair(crew.jobs, crew.best, seed)
    for looks in crew.slices(work):
        if work.looks >= _TURN or not crew.target < work.arena <= crew.arena:
            return
        if work.advance(looks, crew.target):
            crew.found(work.offsets)


def _search(crew: Crew, kind: type[_Complete], seed: int, turn: int) -> None:
    capacity = crew.target
    work = kind(crew.jobs, capacity, seed)
    for looks in crew.slices(work):
        if work.looks >= turn or crew.target != capacity:
            return
        if work.advance(looks):
            if work.infeasible:
                crew.refuted(capacity)
            else:
                crew.found(work.offsets)
            return
