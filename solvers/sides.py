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


class Sides:
    """Plans that are lower than the best: at the target, or as far down as can be.

    First for the target. Where that is given up, for the arena halfway to the best; and so on, halfway from
    the target to what was found or from what was given up to the best, until little is to be gained. Then it
    begins again, with more tries and other random numbers. It never ends by itself.

    Attributes:
        looks: work so far.
        rounds: how often it has come to the end.
        offsets: int64[n], what was found last, or None.
        arena: bytes, of those offsets; 0 before.
    """

    def __init__(self, native: _core.Jobs, seed: int) -> None:
        self.looks, self.rounds, self.arena = 0, 0, 0
        self.offsets: NDArray[np.int64] | None = None
        self._native, self._seed, self._part = native, seed, 0.0
        self._halves: _core.Halves | None = None

    def advance(self, looks: int, target: int, arena: int) -> bool:
        """Go on for so many looks at most; whether there are offsets that come lower than an arena.

        Args:
            looks: after about so many it returns.
            target: bytes that are few enough.
            arena: bytes of the best plan so far.
        """
        before = 0
        if self._halves is None:
            goal = target + int(self._part * (arena - target))
            tries = _TRIES if self.rounds else _TRIES_AT_FIRST
            self._halves = _core.Halves(self._native, goal, self._seed, tries)
            self._seed = (self._seed + 1) % 2**64
        else:
            before = self._halves.looks
        halves = self._halves
        found = halves.advance(looks)
        self.looks += halves.looks - before
        if found:
            self.offsets, self.arena = halves.offsets, halves.arena
            self._part, self._halves = 0.5, None
            return self.arena < arena
        if halves.given_up:
            self._part, self._halves = (1 + self._part) / 2, None
            if self._part > _NEAR:
                self._part, self.rounds = 0.0, self.rounds + 1
        return False
