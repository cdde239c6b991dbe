"""The other cores: each repairs and searches with a seed of its own, until one is good enough."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from solvers import _core

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from solvers.task import Task

#: Looks between two glances at what the others have found; up to some ten milliseconds.
_SLICE = 2_000_000
#: Looks at the target before plans are repaired again.
_TURN = 40_000_000


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Crew:
    """Threads that look for better offsets of a task; their native work does without the interpreter's lock.

    What they find depends on how fast they are. They never touch the task.

    Attributes:
        size: number of threads.
    """

    def __init__(self, task: Task, size: int, *, branch: bool) -> None:
        assert task.offsets is not None
        self.size = size
        self._native, self._size, self._branch = task.jobs.native(), task.jobs.size, branch
        self._lock = threading.Lock()
        self._best, self._arena, self._target = task.offsets, task.arena, task.target
        self._refuted, self._looks, self._over = -1, 0, False
        self._ended = [threading.Event() for _ in range(size)]  # Ctrl-C does harm in Thread.join()
        for k, ended in enumerate(self._ended):
            seed = (task.seed + (k + 1) * 2**48) % 2**64
            threading.Thread(target=self._run, args=(seed, ended), name=f"packing {k}").start()

    def share(self, task: Task) -> None:
        """Give the task what the crew has found, and the crew what is known of the task; count their work."""
        with self._lock:
            best, arena, refuted = self._best, self._arena, self._refuted
            looks, self._looks = self._looks, 0
        task.watch.nodes += looks
        task.offer(best, arena)
        if refuted >= task.lower_bound:
            task.refute(refuted)
        with self._lock:
            self._keep(task.offsets, task.arena)
            self._target = task.target

    def end(self) -> None:
        """Stop and wait for the threads; some ten milliseconds."""
        self._over = True
        for ended in self._ended:
            ended.wait()

    def _keep(self, offsets: NDArray[np.int64] | None, arena: int) -> None:
        if offsets is not None and arena < self._arena:
            self._best, self._arena = offsets, arena

    def _run(self, seed: int, ended: threading.Event) -> None:
        try:
            self._work(seed)
        finally:
            ended.set()

    def _work(self, seed: int) -> None:
        while not self._over:
            self._repair(seed)
            if self._branch:
                self._search(seed)
            seed = (seed + 1) % 2**64

    def _repair(self, seed: int) -> None:
        repair = _core.Repair(self._native, self._best, seed)
        while not self._over and repair.looks < _TURN and self._target < repair.arena <= self._arena:
            before = repair.looks
            better = repair.advance(_SLICE, self._target)
            with self._lock:
                self._looks += repair.looks - before
                if better:
                    self._keep(repair.offsets, repair.arena)

    def _search(self, seed: int) -> None:
        capacity = self._target
        search = _core.Branching(self._native, capacity, seed)
        ended = False
        while not (self._over or ended) and search.looks < _TURN and self._target == capacity:
            before = search.looks
            ended = search.advance(_SLICE)
            with self._lock:
                self._looks += search.looks - before
                if search.infeasible:
                    self._refuted = max(self._refuted, capacity)
                elif search.found:
                    offsets = search.offsets
                    self._keep(offsets, int((offsets + self._size).max()))
