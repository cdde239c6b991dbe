"""State of one packing problem during a solve: the jobs, the limits, and the best offsets so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from solvers.packing.jobs import Jobs
    from solvers.packing.plan import Stop
    from solvers.packing.portfolio import Crew


#: Shortest time in seconds between two progress reports.
PAUSE = 0.1


class Watch:
    """Clock, node budget and interrupt of one solve, shared by the tasks of this solve.

    Attributes:
        stop: the limits.
        nodes: nodes spent so far.
        interrupted: true after the caller or the user has asked to stop.
        tell: reports progress; called by `reason`, at most once every `PAUSE` seconds.

    Args:
        stop: the limits.
        ahead: seconds before the clock limit at which this limit counts as reached.
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
        """Return the wall-clock seconds since the solve began."""
        return time.perf_counter() - self._began

    @property
    def seconds_left(self) -> float | None:
        """Return the wall-clock seconds until this task's limit, or None for no limit."""
        last = self._last_second
        return None if last is None else max(last - self._ahead - self.seconds, 0.0)

    @property
    def nodes_left(self) -> int | None:
        """Return the nodes until this task's limit, or None for no limit."""
        return None if self._last_node is None else max(self._last_node - self.nodes, 0)

    def at_most_half(self, nodes: int) -> int:
        """Return `nodes`, or half of the remaining nodes if that is less, to leave some for later."""
        left = self.nodes_left
        return nodes if left is None else min(nodes, left // 2)

    def share(self, tasks: int) -> None:
        """Set the next task's limits to an equal share of the remaining limits for ``tasks`` tasks."""
        if self.stop.node_budget is not None:
            self._last_node = self.nodes + max(self.stop.node_budget - self.nodes, 0) // tasks
        if self.stop.seconds is not None:
            self._last_second = self.seconds + max(self.stop.seconds - self.seconds, 0.0) / tasks

    def reason(self, *, of_nodes: bool = True) -> str:
        """Return the limit that has been reached: "interrupt", "time", "nodes", or "" for none."""
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
    """One packing problem and the best offsets found so far.

    Attributes:
        jobs: the jobs to pack.
        watch: limits of the solve.
        seed: seed of the solver's random numbers.
        target: an arena in bytes that is small enough; at least the lower bound.
        capacity: largest useful arena in bytes, or None for no limit.
        threads: number of threads that may search at once.
        found: called with (offsets, arena) whenever a smaller arena is found.
        offsets: int64[len(jobs)], the best offsets so far, or None.
        arena: arena of `offsets` in bytes.
        others: the crew of worker threads that search at the same time, or None.
        by_what_is_alive: int64[len(jobs)], the best offsets after maximum load first and before the other
            orders, kept with many jobs because computing them again takes long; None with few jobs.
        lower_bound: the best known bound in bytes: that of the jobs, or a larger one that a solver has
            proven.
        stopped_by: why the solver stopped; "" while the solver may go on.
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
        """Record that no plan has an arena smaller than `arena`; raises the bound and the target."""
        self.lower_bound = max(self.lower_bound, min(self.jobs.attainable(arena), self.arena))
        self.target = max(self.target, self.lower_bound)

    def refute(self, arena: int) -> None:
        """Record that a search has proven that no plan has an arena of at most `arena` bytes."""
        self.bound(arena + 1)
        self._refuted = True

    def done(self, *, of_nodes: bool = True) -> bool:
        """Return whether to stop, and set `stopped_by` to the reason.

        The caller must have added the work done so far to the watch. The results of the crew are taken over
        first, so that none of them is lost at a limit.
        """
        if self.others is not None:
            self.others.share(self)
        limit = self.watch.reason(of_nodes=of_nodes)  # first, because this call reports progress
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
