"""Peak-outward heuristic: packs all jobs again from the peak to both sides, for a sequence of goal arenas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solvers import _core
from solvers.packing.options import OPTIONS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class PeakOutward:
    """Search for plans with a smaller arena than the best, at the target or as close as possible.

    The first goal arena is the target. After a failure the next goal lies halfway between the failed goal and
    the best arena, after a success halfway between the target and the best arena, until little is to be
    gained. Then a new round begins with more tries and other random numbers. The search never ends by itself.

    Jobs far from the peak may end above the goal at first; window repair then repacks these time windows.

    Attributes:
        work: work units so far.
        rounds: number of completed rounds.
        offsets: int64[n], the offsets found last, or None.
        arena: arena of these offsets in bytes; 0 before the first.
    """

    def __init__(self, native: _core.Jobs, seed: int) -> None:
        self.work, self.rounds, self.arena = 0, 0, 0
        self.offsets: NDArray[np.int64] | None = None
        self._native, self._seed, self._part, self._goal = native, seed, 0.0, 0
        self._outward: _core.PeakOutward | None = None
        self._window_repair: _core.WindowRepair | None = None
        self._patience = 0

    def advance(self, units: int, target: int, arena: int) -> bool:
        """Continue for about `units` work units; return true if a smaller arena than `arena` was found.

        Args:
            units: work after which to return.
            target: an arena in bytes that is small enough.
            arena: bytes of the best plan so far.
        """
        if self._window_repair is not None:
            better = self._improve_plan(self._window_repair, units, target)
        else:
            better = self._pack(units, target, arena)
        return better and self.arena < arena

    def _pack(self, units: int, target: int, arena: int) -> bool:
        before = 0
        if self._outward is None:
            self._goal = target + int(self._part * (arena - target))
            tries = OPTIONS.later_tries if self.rounds else OPTIONS.first_tries
            self._outward = _core.PeakOutward(self._native, self._goal, self._next_seed(), tries)
        else:
            before = self._outward.work
        outward = self._outward
        better = outward.advance(units)
        self.work += outward.work - before
        if better:
            self.offsets, self.arena, self._outward = outward.offsets, outward.arena, None
            if self.arena > self._goal:
                self._window_repair = _core.WindowRepair(self._native, self.offsets, self._next_seed())
                self._patience = OPTIONS.far_repair_patience
            else:
                self._part = 0.5
        elif outward.given_up:
            self._outward = None
            self._relax_goal()
        return better

    def _improve_plan(self, repair: _core.WindowRepair, units: int, target: int) -> bool:
        before = repair.work
        better = repair.advance(min(units, self._patience), target)
        spent = repair.work - before
        self.work += spent
        self._patience = OPTIONS.far_repair_patience if better else self._patience - spent
        if better:
            self.offsets, self.arena = repair.offsets, repair.arena
        if self.arena <= target or self._patience <= 0:
            self._window_repair = None
            if self.arena <= self._goal:
                self._part = 0.5
            else:
                self._relax_goal()
        return better

    def _relax_goal(self) -> None:
        self._part = (1 + self._part) / 2
        if self._part > OPTIONS.last_goal:
            self._part, self.rounds = 0.0, self.rounds + 1

    def _next_seed(self) -> int:
        seed, self._seed = self._seed, (self._seed + 1) % 2**64
        return seed
