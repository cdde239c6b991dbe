"""When to record again after recording has ended, and when to plan again what is planned."""

from __future__ import annotations

import math
from typing import NamedTuple

#: One miss in so many allocations is worth no second thought.
FEW_MISSES = 1000
#: The core's score of spoilt iterations at which the pattern has changed for good.
SPOILT = 12
NEVER = 1 << 62
#: Allocations: a pause is four times what was recorded before it, at least that often this, and twice as much
#: each time; so often that what is repeated by then is soon planned, so rarely that it costs nothing.
LEAST_PAUSE, LONGEST_PAUSE = 1 << 6, 1 << 22


class Counts(NamedTuple):
    """So many of either, ever.

    Attributes:
        allocations: of at least the small-size threshold.
        misses: of these, those that found no plan or did not follow it.
    """

    allocations: int
    misses: int


class Due(NamedTuple):
    """What to wait for: enough of any of these.

    Attributes:
        allocations: ever.
        misses: ever.
        spoilt: the core's score of spoilt iterations.
        around: iterations, before which nothing is planned around what stays in a plan's way.
        others_layouts: times that where others' plans lie had changed; None: that is nothing to wait for.
    """

    allocations: int
    misses: int
    spoilt: int
    around: int = 0
    others_layouts: int | None = None


class Rest:
    """The time without recording, and what ends it.

    Where a plan is followed, that is a share of misses that is greater than before. Whatever is followed, it
    is a pause, longer after each recording in vain, unless the plan leaves nothing to be wished.

    Attributes:
        began: allocations when recording began.
    """

    def __init__(self) -> None:
        """Recording has not begun."""
        self._since = Counts(0, 0)  # when recording began, or ended
        self.began = 0
        self._vain = 0  # recordings in vain, one after another
        self._unimproved = 0  # and those that found nothing better than what all followed
        self._until = NEVER  # allocations
        self._share = math.inf  # of misses, beyond which it ends while a plan is in effect
        self._spoilt = NEVER  # the core's score that ends it then, too
        self._planned = False  # it ends when no plan is in effect any more

    def recorded_from(self, now: Counts) -> None:
        """Recording has begun."""
        if now.allocations < self._until:  # it was called for
            self._unimproved = 0
        self._since, self.began = now, now.allocations

    def planned(self, now: Counts, *, anew: bool) -> None:
        """There is another plan, perhaps of what was never planned before, and recording goes on."""
        self._since = now
        if anew:
            self._vain = 0

    def share_of_misses(self, now: Counts) -> float:
        """Since recording began, or ended, or went on with another plan."""
        return (now.misses - self._since.misses) / max(now.allocations - self._since.allocations, 1)

    def since_settled(self, now: Counts, *, improvable: bool = False) -> None:
        """All has followed the plan for long, which might be ``improvable`` one day."""
        self._pause(now, doublings=self._unimproved)
        self._vain, self._unimproved = 0, self._unimproved + 1
        if not improvable:
            self._until = NEVER
        self._share, self._spoilt, self._planned = 1 / FEW_MISSES, SPOILT, True

    def since_vain(self, now: Counts, *, replaying: bool) -> None:
        """Recording has shown nothing new for long; some may go off the plan for ever."""
        share = self.share_of_misses(now)
        self.since_failure(now)
        if replaying and share < 1 / 4:
            self._share, self._planned = max(1 / FEW_MISSES, 2 * share), True

    def since_failure(self, now: Counts) -> None:
        """Something failed, or a plan was of no use: nothing is learned for some time, whatever is missed."""
        self._pause(now, doublings=self._vain)
        self._vain += 1

    def since_deserted(self, now: Counts, *, recording: bool) -> None:
        """No plan is left. A pause that has begun goes on, and is no longer for that: it failed only once."""
        if recording or now.allocations >= self._until:
            self.since_failure(now)
        self._share, self._spoilt, self._planned = math.inf, NEVER, False

    def _pause(self, now: Counts, *, doublings: int) -> None:
        recorded = max(now.allocations - self.began, LEAST_PAUSE)
        self._until = now.allocations + min(recorded << min(2 + doublings, 40), LONGEST_PAUSE)
        self._since = now
        self._share, self._spoilt, self._planned = math.inf, NEVER, False

    def due(self, now: Counts, *, replaying: bool) -> Due:
        """What may end it: not before there is so much."""
        if not replaying:
            return Due(0 if self._planned else self._until, NEVER, NEVER)
        if math.isinf(self._share):
            return Due(self._until, NEVER, self._spoilt)
        passed = max(now.allocations - self._since.allocations, 0)
        return Due(self._until, self._since.misses + int(self._share * passed) + 1, self._spoilt)

    def is_over(self, now: Counts, *, replaying: bool, spoilt: int) -> bool:
        """Whether to record again."""
        if now.allocations >= self._until or not replaying:
            return now.allocations >= self._until or self._planned
        return spoilt >= self._spoilt or self.share_of_misses(now) > self._share


class Rarely:
    """What is done when it is called for, then ever more rarely, as where it is called for without end.

    Attributes:
        at: iteration, before which it is not done again.
    """

    def __init__(self, longest: int = NEVER) -> None:
        """It may be done at once; no pause is longer than so many iterations."""
        self.at, self._gap, self._longest = 0, 2, longest

    def may_be_done(self, iteration: int) -> bool:
        """Whether it is time."""
        return iteration >= self.at

    def not_before(self, iteration: int) -> None:
        """It is not time before this iteration."""
        self.at = iteration

    def is_done(self, iteration: int) -> None:
        """It is done now; each time the pause is twice as long."""
        self._gap = min(2 * self._gap, self._longest)
        self.at = iteration + self._gap
