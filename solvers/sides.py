"""All packed anew from the peak to either side, for one arena after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solvers import _core

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Tries for one arena in the first round, and in later ones: more find little. Measured.
_TRIES_AT_FIRST, _TRIES = 2, 6
#: Part of the gap from which on less is not tried in the same round.
_NEAR = 0.8
#: Looks at stretches far from the peak for which nothing becomes lower before they are given up. Measured.
_PATIENCE = 2**27


class Sides:
    """Plans that are lower than the best: at the target, or as far down as can be.

    First for the target. Where that is given up, for the arena halfway to the best; and so on, halfway from
    the target to what was found or from what was given up to the best, until little is to be gained. Then it
    begins again, with more tries and other random numbers. It never ends by itself.

    What lies far from the peak may be too high at first. Then stretches of time are filled anew.

    Attributes:
        looks: work so far.
        rounds: how often it has come to the end.
        offsets: int64[n], what was found last, or None.
        arena: bytes, of those offsets; 0 before.
    """

    def __init__(self, native: _core.Jobs, seed: int) -> None:
        self.looks, self.rounds, self.arena = 0, 0, 0
        self.offsets: NDArray[np.int64] | None = None
        self._native, self._seed, self._part, self._goal = native, seed, 0.0, 0
        self._outward: _core.Outward | None = None
        self._stretches: _core.Stretches | None = None
        self._patience = 0

    def advance(self, looks: int, target: int, arena: int) -> bool:
        """Go on for so many looks at most; whether there are offsets that come lower than an arena.

        Args:
            looks: after about so many it returns.
            target: bytes that are few enough.
            arena: bytes of the best plan so far.
        """
        if self._stretches is not None:
            found = self._mend(self._stretches, looks, target)
        else:
            found = self._pack(looks, target, arena)
        return found and self.arena < arena

    def _pack(self, looks: int, target: int, arena: int) -> bool:
        before = 0
        if self._outward is None:
            self._goal = target + int(self._part * (arena - target))
            tries = _TRIES if self.rounds else _TRIES_AT_FIRST
            self._outward = _core.Outward(self._native, self._goal, self._next_seed(), tries)
        else:
            before = self._outward.looks
        outward = self._outward
        found = outward.advance(looks)
        self.looks += outward.looks - before
        if found:
            self.offsets, self.arena, self._outward = outward.offsets, outward.arena, None
            if self.arena > self._goal:
                self._stretches = _core.Stretches(self._native, self.offsets, self._next_seed())
                self._patience = _PATIENCE
            else:
                self._part = 0.5
        elif outward.given_up:
            self._outward = None
            self._ask_for_less()
        return found

    def _mend(self, stretches: _core.Stretches, looks: int, target: int) -> bool:
        before = stretches.looks
        found = stretches.advance(min(looks, self._patience), target)
        spent = stretches.looks - before
        self.looks += spent
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
