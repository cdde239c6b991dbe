"""What a solver works on: the jobs, the limits, and the best offsets so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from solvers.crew import Crew
    from solvers.jobs import Jobs
    from solvers.plan import Stop


#: Seconds at least from one report of progress to the next.
PAUSE = 0.1


class Watch:
    """Clock, budget and interrupt of one solve, shared by its tasks.

    Attributes:
        stop: the limits.
        nodes: work so far.
        interrupted: whether the caller or the user wants it to end.
        tell: reports progress; called now and then when a limit is asked for.

    Args:
        stop: the limits.
        ahead: seconds before the limit of the clock at which it counts as reached.
    """

    def __init__(self, stop: Stop, ahead: float = 0.0) -> None:
        self.stop, self._ahead = stop, ahead
        self.nodes = 0
        self.interrupted = False
        self.tell: Callable[[], None] | None = None
        self._told = 0.0
        self._began = time.perf_counter()
        self._last_node, self._last_second = stop.node_budget, stop.seconds

    @property
    def seconds(self) -> float:
        """Wall clock since the solve began."""
        return time.perf_counter() - self._began

    @property
    def seconds_left(self) -> float | None:
        """Wall clock until this task's limit, or None for no limit."""
        last = self._last_second
        return None if last is None else max(last - self._ahead - self.seconds, 0.0)

    @property
    def nodes_left(self) -> int | None:
        """Nodes until this task's limit, or None for no limit."""
        return None if self._last_node is None else max(self._last_node - self.nodes, 0)

    def at_most_half(self, nodes: int) -> int:
        """So many nodes, or half of what is left if that is less, so that what comes next has its turn."""
        left = self.nodes_left
        return nodes if left is None else min(nodes, left // 2)

    def share(self, tasks: int) -> None:
        """Leave the next task its share of what is left for ``tasks`` tasks."""
        if self.stop.node_budget is not None:
            self._last_node = self.nodes + max(self.stop.node_budget - self.nodes, 0) // tasks
        if self.stop.seconds is not None:
            self._last_second = self.seconds + max(self.stop.seconds - self.seconds, 0.0) / tasks

    def reason(self, *, of_nodes: bool = True) -> str:
        """Which limit has been reached: "interrupt", "time", "nodes", or "" for none."""
        if self.tell is not None and self.seconds >= self._told + PAUSE:
            self._told = self.seconds
            self.tell()
        if self.interrupted or (self.stop.interrupt is not None and self.stop.interrupt()):
            self.interrupted = True
            return "interrupt"
        if self.seconds_left == 0.0:
            return "time"
        return "nodes" if of_nodes and self.nodes_left == 0 else ""


@dataclass(eq=False)
class Task:
    """One packing problem, and what has been found for it.

    Attributes:
        jobs: what to pack.
        watch: limits of the solve.
        seed: of the solver's random numbers.
        target: an arena that is small enough; at least the lower bound.
        capacity: an arena above it is of no use, or None.
        threads: how many may search at once.
        found: called with (offsets, arena) whenever a smaller arena was found.
        offsets: int64[len(jobs)], the best so far, or None.
        arena: its size.
        others: who else looks for offsets meanwhile, if anyone.
        by_what_is_alive: int64[len(jobs)], the best before other orders, where it is dear to make again.
        lower_bound: the best bound known, that of the jobs or one that a solver has proven.
        stopped_by: why the solver stopped.
    """

    jobs: Jobs
    watch: Watch
    seed: int = 0
    target: int = 0
    capacity: int | None = None
    threads: int = 1
    found: Callable[[NDArray[np.int64], int], None] | None = None
    offsets: NDArray[np.int64] | None = None
    arena: int = 0
    others: Crew | None = None
    by_what_is_alive: NDArray[np.int64] | None = None
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
        if self.found is not None:
            self.found(offsets, arena)

    def bound(self, arena: int) -> None:
        """Take note that no plan has a smaller arena than this."""
        self.lower_bound = max(self.lower_bound, min(self.jobs.attainable(arena), self.arena))
        self.target = max(self.target, self.lower_bound)

    def refute(self, arena: int) -> None:
        """Take note that no plan has an arena of this size or a smaller one, as a search has shown."""
        self.bound(arena + 1)
        self._refuted = True

    def done(self, *, of_nodes: bool = True) -> bool:
        """Whether to stop; `stopped_by` then says why. Work done so far must have been told to the watch.

        What others have found meanwhile is the task's first, so that none of it is lost at a limit.
        """
        if self.others is not None:
            self.others.share(self)
        limit = self.watch.reason(of_nodes=of_nodes)  # first: it tells how far the search has come
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
