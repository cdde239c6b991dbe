"""Peak-outward heuristic: packs all jobs again from the peak to both sides, for a sequence of goal arenas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solvers import _core

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Tries for one goal arena in the first round and in later rounds; more tries find little. Measured.
_TRIES_AT_FIRST, _TRIES = 2, 6
#: Fraction of the gap above which a goal arena gains too little and the round ends.
_NEAR = 0.8
#: Work units of window repair far from the peak without improvement before that repair is given up. Measured.
_PATIENCE = 2**27


class Sides:
    """Search for plans with a smaller arena than the best, at the target or as close as possible.

    The first goal arena is the target. After a failure the next goal lies halfway between the failed goal and
    the best arena, after a success halfway between the target and the best arena, until little is to be
    gained. Then a new round begins with more tries and other random numbers. The search never ends by itself.

    Jobs far from the peak may end above the goal at first; window repair then repacks these time windows.

    Attributes:
        units: work so far.
        rounds: number of completed rounds.
        offsets: int64[n], the offsets found last, or None.
        arena: arena of these offsets in bytes; 0 before the first.
    """

    def __init__(self, native: _core.Jobs, seed: int) -> None:
        self.work, self.rounds, self.arena = 0, 0, 0
        self.offsets: NDArray[np.int64] | None = None
        self._native, self._seed, self._part, self._goal = native, seed, 0.0, 0
        self._outward: _core.PeakOutward | None = None
        self._stretches: _core.WindowRepair | None = None
        self._patience = 0

    def advance(self, units: int, target: int, arena: int) -> bool:
        """Continue for about `units` work units; return true if a smaller arena than `arena` was found.

        Args:
            units: work after which to return.
            target: an arena in bytes that is small enough.
            arena: bytes of the best plan so far.
        """
        if self._stretches is not None:
            found = self._mend(self._stretches, units, target)
        else:
            found = self._pack(units, target, arena)
        return found and self.arena < arena

    def _pack(self, units: int, target: int, arena: int) -> bool:
        before = 0
        if self._outward is None:
            self._goal = target + int(self._part * (arena - target))
            tries = _TRIES if self.rounds else _TRIES_AT_FIRST
            self._outward = _core.PeakOutward(self._native, self._goal, self._next_seed(), tries)
        else:
            before = self._outward.work
        outward = self._outward
        found = outward.advance(units)
        self.work += outward.work - before
        if found:
            self.offsets, self.arena, self._outward = outward.offsets, outward.arena, None
            if self.arena > self._goal:
                self._stretches = _core.WindowRepair(self._native, self.offsets, self._next_seed())
                self._patience = _PATIENCE
            else:
                self._part = 0.5
        elif outward.given_up:
            self._outward = None
            self._ask_for_less()
        return found

    def _mend(self, stretches: _core.WindowRepair, units: int, target: int) -> bool:
        before = stretches.work
        found = stretches.advance(min(units, self._patience), target)
        spent = stretches.work - before
        self.work += spent
        self._patience = _PATIENCE if found else self._patience - spent
        if found:
            self.offsets, self.arena = stretches.offsets, stretches.arena
        if self.arena <= target or self._patience <= 0:
            self._stretches = None
            if self.arena <= self._goal:
                self._part = 0.5
            else:
                self._ask_for_less()
        return found

    def _ask_for_less(self) -> None:
        self._part = (1 + self._part) / 2
        if self._part > _NEAR:
            self._part, self.rounds = 0.0, self.rounds + 1

    def _next_seed(self) -> int:
        seed, self._seed = self._seed, (self._seed + 1) % 2**64
        return seed
