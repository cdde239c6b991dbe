"""Backoff for recording and replanning: when to record again, and when to plan a pattern again."""

from __future__ import annotations

import math
from typing import NamedTuple

#: Largest number of allocations per miss that still justifies recording again; a share of misses below its
#: inverse is ignored.
FEW_MISSES = 1000
#: Core's score of spoilt iterations at which the pattern counts as changed for good.
SPOILT = 12
NEVER = 1 << 62
#: Bounds of a pause between recordings, in allocations. A pause is four times the length of the recording
#: before it, at least four times LEAST_PAUSE, and doubles with each failure up to LONGEST_PAUSE: short enough
#: that a new pattern is planned soon, rare enough to cost nothing.
LEAST_PAUSE, LONGEST_PAUSE = 1 << 6, 1 << 22


class Counts(NamedTuple):
    """Allocation counters of a client since the start.

    Attributes:
        allocations: number of allocations of at least the small-size threshold.
        misses: number of these allocations that had no plan or did not follow the plan.
    """

    allocations: int
    misses: int


class Due(NamedTuple):
    """Wake conditions: reaching any one of these counters ends the wait.

    Attributes:
        allocations: total number of allocations.
        misses: total number of misses.
        spoilt: the core's score of spoilt iterations.
        around: iteration before which no plan is made around pinned ranges.
        others_layouts: number of layout changes of other clients' plans; None disables this condition.
    """

    allocations: int
    misses: int
    spoilt: int
    around: int = 0
    others_layouts: int | None = None


class Rest:
    """Schedule of recording: the time without recording, and the conditions that end it.

    While a plan is followed, a share of misses greater than before ends the pause. In all cases, the pause
    also ends after a number of allocations, longer after each failed recording, unless the plan cannot be
    improved.

    Attributes:
        began: number of allocations when the last recording began.
    """

    def __init__(self) -> None:
        """Start before the first recording."""
        self._since = Counts(0, 0)  # counters when recording began or ended
        self.began = 0
        self._vain = 0  # consecutive failed recordings
        self._unimproved = 0  # consecutive recordings that found no better plan than the followed one
        self._until = NEVER  # allocation count at which the pause ends
        self._share = math.inf  # share of misses that ends the pause while a plan is in effect
        self._spoilt = NEVER  # score of spoilt iterations that ends the pause while a plan is in effect
        self._planned = False  # the pause ends when no plan is in effect any more

    def recorded_from(self, now: Counts) -> None:
        """Note that recording has begun."""
        if now.allocations < self._until:  # recording was requested before the pause was over
            self._unimproved = 0
        self._since, self.began = now, now.allocations

    def planned(self, now: Counts, *, anew: bool) -> None:
        """Note a new plan while recording goes on; `anew`: for a pattern that was never planned before."""
        self._since = now
        if anew:
            self._vain = 0

    def share_of_misses(self, now: Counts) -> float:
        """Return the share of misses since recording began, ended or got another plan."""
        return (now.misses - self._since.misses) / max(now.allocations - self._since.allocations, 1)

    def since_settled(self, now: Counts, *, improvable: bool = False) -> None:
        """Pause because the program has long followed the plan, which may be ``improvable`` later."""
        self._pause(now, doublings=self._unimproved)
        self._vain, self._unimproved = 0, self._unimproved + 1
        if not improvable:
            self._until = NEVER
        self._share, self._spoilt, self._planned = 1 / FEW_MISSES, SPOILT, True

    def since_vain(self, now: Counts, *, replaying: bool) -> None:
        """Pause because recording has long shown nothing new; some allocations may never follow the plan."""
        share = self.share_of_misses(now)
        self.since_failure(now)
        if replaying and share < 1 / 4:
            self._share, self._planned = max(1 / FEW_MISSES, 2 * share), True

    def since_failure(self, now: Counts) -> None:
        """Pause after a failure or a useless plan: learn nothing for some time, whatever the misses."""
        self._pause(now, doublings=self._vain)
        self._vain += 1

    def since_deserted(self, now: Counts, *, recording: bool) -> None:
        """Note that no plan is left; an unfinished pause continues unchanged, as this is a single failure."""
        if recording or now.allocations >= self._until:
            self.since_failure(now)
        self._share, self._spoilt, self._planned = math.inf, NEVER, False

    def _pause(self, now: Counts, *, doublings: int) -> None:
        recorded = max(now.allocations - self.began, LEAST_PAUSE)
        self._until = now.allocations + min(recorded << min(2 + doublings, 40), LONGEST_PAUSE)
        self._since = now
        self._share, self._spoilt, self._planned = math.inf, NEVER, False

    def due(self, now: Counts, *, replaying: bool) -> Due:
        """Return the earliest counters at which the pause may end."""
        if not replaying:
            return Due(0 if self._planned else self._until, NEVER, NEVER)
        if math.isinf(self._share):
            return Due(self._until, NEVER, self._spoilt)
        passed = max(now.allocations - self._since.allocations, 0)
        return Due(self._until, self._since.misses + int(self._share * passed) + 1, self._spoilt)

    def is_over(self, now: Counts, *, replaying: bool, spoilt: int) -> bool:
        """Return true if recording should start again."""
        if now.allocations >= self._until or not replaying:
            return now.allocations >= self._until or self._planned
        return spoilt >= self._spoilt or self.share_of_misses(now) > self._share


class Rarely:
    """Exponential backoff, in iterations, for an action that may be requested without end.

    Attributes:
        at: first iteration in which the action is allowed again.
    """

    def __init__(self, longest: int = NEVER) -> None:
        """Allow the action at once; no pause is longer than `longest` iterations."""
        self.at, self._gap, self._longest = 0, 2, longest

    def may_be_done(self, iteration: int) -> bool:
        """Return true if the action is allowed in this iteration."""
        return iteration >= self.at

    def not_before(self, iteration: int) -> None:
        """Forbid the action before this iteration."""
        self.at = iteration

    def is_done(self, iteration: int) -> None:
        """Note that the action is done in this iteration, and double the pause."""
        self._gap = min(2 * self._gap, self._longest)
        self.at = iteration + self._gap
