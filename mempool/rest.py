"""When to record again after recording has ended, and when to plan again what is planned."""

from __future__ import annotations

from typing import NamedTuple

#: One miss in so many allocations is worth no second thought.
FEW_MISSES = 1000
#: The core's score of spoilt iterations at which the pattern has changed for good.
SPOILT = 12
NEVER = 1 << 62


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
    """

    allocations: int
    misses: int
    spoilt: int
    around: int = 0


class Rest:
    """The time without recording, and what ends it.

    Where a plan is followed, that is a share of misses that is greater than before; where there is none, or
    nothing follows it, that so many more allocations have been made.
    """

    def __init__(self) -> None:
        """Recording has not begun."""
        self._since = Counts(0, 0)  # when recording began, or ended
        self._share = 0.0  # of misses, that ends it; of a plan that is followed
        self._spoilt = NEVER  # the core's score that ends it too
        self._until = NEVER  # allocations; 0: the share says

    def recorded_from(self, now: Counts) -> None:
        """Recording has begun, or it goes on with another plan."""
        self._since, self._until = now, 0

    def since_settled(self, now: Counts) -> None:
        """All has followed the plan for long."""
        self._since, self._share, self._spoilt, self._until = now, 1 / FEW_MISSES, SPOILT, 0

    def since_vain(self, now: Counts, *, replaying: bool) -> None:
        """Recording has shown nothing new for long; some may go off the plan for ever."""
        allocations = now.allocations - self._since.allocations
        share = (now.misses - self._since.misses) / max(allocations, 1)
        if replaying and share < 1 / 4:
            self._since, self._share, self._until = now, max(1 / FEW_MISSES, 2 * share), 0
            self._spoilt = NEVER  # each iteration may miss once
        else:
            self.for_long(now)

    def for_long(self, now: Counts, *, times: int = 4) -> None:
        """Nothing can be learned now, whatever goes off the plan, before there were so many times as many."""
        self._since, self._until = now, max(1, times * now.allocations)

    def due(self, now: Counts, *, replaying: bool) -> Due:
        """What may end it: not before there is so much."""
        if self._until or not replaying:
            return Due(self._until, NEVER, NEVER)
        passed = max(now.allocations - self._since.allocations, 0)
        return Due(NEVER, self._since.misses + int(self._share * passed) + 1, self._spoilt)

    def is_over(self, now: Counts, *, replaying: bool, spoilt: int) -> bool:
        """Whether to record again."""
        if self._until or not replaying:
            return now.allocations >= self._until
        misses = now.misses - self._since.misses
        return spoilt >= self._spoilt or misses > self._share * (now.allocations - self._since.allocations)


class Rarely:
    """What is done when it is called for, then ever more rarely, as where it is called for without end.

    Attributes:
        at: iteration, before which it is not done again.
    """

    def __init__(self) -> None:
        """It may be done at once."""
        self.at, self._gap = 0, 2

    def may_be_done(self, iteration: int) -> bool:
        """Whether it is time."""
        return iteration >= self.at

    def is_done(self, iteration: int) -> None:
        """It is done now; each time the pause is twice as long."""
        self._gap *= 2
        self.at = iteration + self._gap
