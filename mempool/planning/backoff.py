"""Backoff for recording and replanning: when to record again, and when to plan a pattern again."""

from __future__ import annotations

import math
from typing import NamedTuple

from mempool.planning.options import OPTIONS

NEVER = 1 << 62


class AllocationCounts(NamedTuple):
    """Allocation counters of a client since the start.

    Attributes:
        allocations: number of allocations of at least the small-size threshold.
        misses: number of these allocations that had no plan or did not follow the plan.
    """

    allocations: int
    misses: int


class WakeConditions(NamedTuple):
    """Wake conditions: reaching any one of these counters ends the wait.

    Attributes:
        allocations: total number of allocations.
        misses: total number of misses.
        miss_score: the core's score of iterations with misses.
        replan_at_iteration: iteration before which no plan is made around pinned ranges.
        other_layouts: number of layout changes of other clients' plans; None disables this condition.
    """

    allocations: int
    misses: int
    miss_score: int
    replan_at_iteration: int = 0
    other_layouts: int | None = None


class RecordingSchedule:
    """Schedule of recording: the time without recording, and the conditions that end it.

    While a plan is followed, a share of misses greater than before ends the pause. In all cases, the pause
    also ends after a number of allocations, longer after each failed recording, unless the plan cannot be
    improved.

    Attributes:
        began: number of allocations when the last recording began.
    """

    def __init__(self) -> None:
        """Start before the first recording."""
        self._since = AllocationCounts(0, 0)  # counters when recording began or ended
        self.began = 0
        self._fruitless = 0  # consecutive failed recordings
        self._unimproved = 0  # consecutive recordings that found no better plan than the followed one
        self._pause_until = NEVER  # allocation count at which the pause ends
        self._share = math.inf  # share of misses that ends the pause while a plan is in effect
        self._miss_score = NEVER  # score of misses that ends the pause while a plan is in effect
        self._planned = False  # the pause ends when no plan is in effect any more

    def recording_began(self, now: AllocationCounts) -> None:
        """Note that recording has begun."""
        if now.allocations < self._pause_until:  # recording was requested before the pause was over
            self._unimproved = 0
        self._since, self.began = now, now.allocations

    def plan_installed(self, now: AllocationCounts, *, anew: bool) -> None:
        """Note a new plan while recording goes on; `anew`: for a pattern that was never planned before."""
        self._since = now
        if anew:
            self._fruitless = 0

    def miss_rate(self, now: AllocationCounts) -> float:
        """Return the share of misses since recording last began or ended, or since the latest plan."""
        return (now.misses - self._since.misses) / max(now.allocations - self._since.allocations, 1)

    def pause_settled(self, now: AllocationCounts, *, improvable: bool = False) -> None:
        """Pause because the program has long followed the plan, which may be ``improvable`` later."""
        self._pause(now, doublings=self._unimproved)
        self._fruitless, self._unimproved = 0, self._unimproved + 1
        if not improvable:
            self._pause_until = NEVER
        self._share, self._miss_score, self._planned = OPTIONS.ignored_miss_rate, OPTIONS.changed_score, True

    def pause_fruitless(self, now: AllocationCounts, *, replaying: bool) -> None:
        """Pause because recording has long shown nothing new; some allocations may never follow the plan."""
        share = self.miss_rate(now)
        self.pause_failed(now)
        if replaying and share < 1 / 4:
            self._share, self._planned = max(OPTIONS.ignored_miss_rate, 2 * share), True

    def pause_failed(self, now: AllocationCounts) -> None:
        """Pause after a failure or a useless plan: learn nothing for some time, whatever the misses."""
        self._pause(now, doublings=self._fruitless)
        self._fruitless += 1

    def plans_dropped(self, now: AllocationCounts, *, recording: bool) -> None:
        """Note that no plan is left; an unfinished pause continues unchanged, as this is a single failure."""
        if recording or now.allocations >= self._pause_until:
            self.pause_failed(now)
        self._share, self._miss_score, self._planned = math.inf, NEVER, False

    def _pause(self, now: AllocationCounts, *, doublings: int) -> None:
        recorded = max(now.allocations - self.began, OPTIONS.min_pause)
        self._pause_until = now.allocations + min(recorded << min(2 + doublings, 40), OPTIONS.max_pause)
        self._since = now
        self._share, self._miss_score, self._planned = math.inf, NEVER, False

    def wake_conditions(self, now: AllocationCounts, *, replaying: bool) -> WakeConditions:
        """Return the earliest counters at which the pause may end."""
        if not replaying:
            return WakeConditions(0 if self._planned else self._pause_until, NEVER, NEVER)
        if math.isinf(self._share):
            return WakeConditions(self._pause_until, NEVER, self._miss_score)
        passed = max(now.allocations - self._since.allocations, 0)
        return WakeConditions(
            self._pause_until, self._since.misses + int(self._share * passed) + 1, self._miss_score
        )

    def is_over(self, now: AllocationCounts, *, replaying: bool, miss_score: int) -> bool:
        """Return true if recording should start again."""
        if now.allocations >= self._pause_until or not replaying:
            return now.allocations >= self._pause_until or self._planned
        return miss_score >= self._miss_score or self.miss_rate(now) > self._share


class ExponentialBackoff:
    """Exponential backoff, in iterations, for an action that may be requested without end.

    Attributes:
        allowed_at: first iteration in which the action is allowed again.
    """

    def __init__(self, longest: int = NEVER) -> None:
        """Allow the action at once; no pause is longer than `longest` iterations."""
        self.allowed_at, self._gap, self._longest = 0, 2, longest

    def is_allowed(self, iteration: int) -> bool:
        """Return true if the action is allowed in this iteration."""
        return iteration >= self.allowed_at

    def forbid_before(self, iteration: int) -> None:
        """Forbid the action before this iteration."""
        self.allowed_at = iteration

    def record_attempt(self, iteration: int) -> None:
        """Note that the action is done in this iteration, and double the pause."""
        self._gap = min(2 * self._gap, self._longest)
        self.allowed_at = iteration + self._gap
