"""Progress reports of a running search."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from solvers.packing.plan import gap_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from solvers.packing.plan import Plan


@dataclass(frozen=True)
class Progress:
    """State of a running search.

    Attributes:
        arena_bytes: the smallest arena so far, even if above the capacity; None before the first plan.
        lower_bound_bytes: lower bound on the arena; a search may raise this bound.
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


class Total:
    """Progress over several attempts: converts reports of one attempt to reports over all so far."""

    def __init__(self, tell: Callable[[Progress], None] | None = None) -> None:
        self.nodes = 0
        self._tell, self._began = tell, time.perf_counter()
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

    def teller(self, bound: Callable[[int], int]) -> Callable[[Progress], None] | None:
        """Return the progress callback for the next attempt, or None if no one listens.

        Args:
            bound: converts that attempt's lower bound to a lower bound over all attempts, in bytes.
        """
        tell = self._tell
        if tell is None:
            return None

        def told(of_one: Progress) -> None:
            self._arena_bytes = self._smaller(of_one.arena_bytes)
            tell(
                Progress(
                    self._arena_bytes,
                    bound(of_one.lower_bound_bytes),
                    self.nodes + of_one.nodes,
                    self.seconds,
                )
            )

        return told

    def _smaller(self, arena_bytes: int | None) -> int | None:
        arenas = [arena for arena in (arena_bytes, self._arena_bytes) if arena is not None]
        return min(arenas, default=None)
