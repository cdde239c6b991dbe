"""Limits and progress reports of a running search."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from solvers.packing.options import OPTIONS
from solvers.packing.plan import gap_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from solvers.packing.plan import Plan, Stop


@dataclass(frozen=True)
class Progress:
    """State of a running search.

    Attributes:
        arena_bytes: the smallest arena so far, even if above the capacity; None before the first plan.
        lower_bound_bytes: best lower bound on the arena so far.
        nodes: work so far, as in `Plan`.
        seconds: wall-clock time so far.
    """

    arena_bytes: int | None
    lower_bound_bytes: int
    nodes: int
    seconds: float

    @property
    def gap(self) -> float | None:
        """Return the gap between arena and lower bound, as in `Plan`; None without an arena."""
        return None if self.arena_bytes is None else gap_of(self.arena_bytes, self.lower_bound_bytes)


class ProgressTotal:
    """Progress over several attempts: converts reports of one attempt to reports over all attempts so far."""

    def __init__(self, on_progress: Callable[[Progress], None] | None = None) -> None:
        self.nodes = 0
        self._on_progress, self._began = on_progress, time.perf_counter()
        self._arena_bytes: int | None = None

    @property
    def seconds(self) -> float:
        """Return the wall-clock seconds since the first attempt began."""
        return time.perf_counter() - self._began

    def add(self, plan: Plan) -> None:
        """Add the nodes and the arena of an attempt that has ended."""
        self.nodes += plan.nodes
        if plan.offset is not None:
            self._arena_bytes = self._smaller(plan.arena_bytes)

    def callback(self, bound: Callable[[int], int]) -> Callable[[Progress], None] | None:
        """Return the progress callback for the next attempt, or None without a callback for the total.

        Args:
            bound: converts that attempt's lower bound to a lower bound over all attempts, in bytes.
        """
        on_progress = self._on_progress
        if on_progress is None:
            return None

        def report(attempt: Progress) -> None:
            self._arena_bytes = self._smaller(attempt.arena_bytes)
            nodes = self.nodes + attempt.nodes
            on_progress(Progress(self._arena_bytes, bound(attempt.lower_bound_bytes), nodes, self.seconds))

        return report

    def _smaller(self, arena_bytes: int | None) -> int | None:
        arenas = [arena for arena in (arena_bytes, self._arena_bytes) if arena is not None]
        return min(arenas, default=None)


class Budget:
    """Clock, node budget and interrupt of one solve, shared by the tasks of this solve.

    Attributes:
        stop: the limits.
        nodes: nodes spent so far.
        interrupted: true after the caller or the user requested a stop.
        report: reports progress; called by `reached_limit` at most ten times a second.

    Args:
        stop: the limits.
        ahead: the clock limit counts as reached this many seconds earlier.
    """

    def __init__(self, stop: Stop, ahead: float = 0.0) -> None:
        self.stop, self._ahead = stop, ahead
        self.nodes = 0
        self.interrupted = False
        self.report: Callable[[], None] | None = None
        self._last_report = 0.0
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
        """Return the smaller of `nodes` and half of the remaining nodes."""
        left = self.nodes_left
        return nodes if left is None else min(nodes, left // 2)

    def share(self, tasks: int) -> None:
        """Set the next task's limits to the remaining limits divided by ``tasks``."""
        if self.stop.node_budget is not None:
            self._last_node = self.nodes + max(self.stop.node_budget - self.nodes, 0) // tasks
        if self.stop.seconds is not None:
            self._last_second = self.seconds + max(self.stop.seconds - self.seconds, 0.0) / tasks

    def reached_limit(self, *, check_nodes: bool = True) -> str:
        """Return the limit that has been reached: "interrupt", "time", "nodes", or "" for none."""
        if self.report is not None and self.seconds >= self._last_report + OPTIONS.report_pause:
            self._last_report = self.seconds
            self.report()
        if self.interrupted or (self.stop.interrupt is not None and self.stop.interrupt()):
            self.interrupted = True
            return "interrupt"
        if self.seconds_left == 0.0:
            return "time"
        return "nodes" if check_nodes and self.nodes_left == 0 else ""
