"""What is told of a search while it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from solvers.plan import gap_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from solvers.plan import Plan


@dataclass(frozen=True)
class Progress:
    """How far a search has come.

    Attributes:
        arena_bytes: the smallest arena so far, also where it is above the capacity; None when there is none.
        lower_bound_bytes: no arena can be smaller; a search may raise it.
        nodes: work so far, as in `Plan`.
        seconds: wall clock so far.
    """

    arena_bytes: int | None
    lower_bound_bytes: int
    nodes: int
    seconds: float

    @property
    def gap(self) -> float | None:
        """How far the arena is above the lower bound, as in `Plan`; None without an arena."""
        return None if self.arena_bytes is None else gap_of(self.arena_bytes, self.lower_bound_bytes)


class Total:
    """Of several attempts one after the other: what is told of one becomes true of all so far."""

    def __init__(self, tell: Callable[[Progress], None] | None = None) -> None:
        self.nodes = 0
        self._tell, self._began = tell, time.perf_counter()
        self._arena_bytes: int | None = None

    @property
    def seconds(self) -> float:
        """Wall clock since the first began."""
        return time.perf_counter() - self._began

    def add(self, plan: Plan) -> None:
        """An attempt has ended."""
        self.nodes += plan.nodes
        if plan.offset is not None:
            self._arena_bytes = self._smaller(plan.arena_bytes)

    def teller(self, bound: Callable[[int], int]) -> Callable[[Progress], None] | None:
        """What the next attempt is to call, or None if nobody listens.

        Args:
            bound: bytes; of the bound of that attempt it makes the one of all.
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
