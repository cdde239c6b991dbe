"""When kinds of iterations are planned together: where what one leaves alive is in another one's way.

What is known of them, and the plans, are `mempool.kinds`'.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from mempool.rest import Rarely

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mempool.kinds import Kinds
    from mempool.planned import Planned
    from mempool.rest import Counts
    from traces.pattern import Pattern

#: Since the last plan, so many allocations at least, and this share of all, found their places taken: a kept
#: tensor may do that, too.
LEAST_COLLISIONS, MOST_COLLIDING = 16, 1 / 512
#: Plans that are made together may need so many times as much as the largest of those that were not.
MOST_TOGETHER = 1.25


class Together:
    """Of one client's plans, those that were made together."""

    def __init__(self) -> None:
        """None were."""
        self._keys: set[bytes] = set()
        self._again = Rarely()
        self._allocations = self._occupied = 0  # when the last plan was made
        self._most = 0  # kinds that were known when that was looked at

    def __bool__(self) -> bool:
        return bool(self._keys)

    def have(self, planned: Planned) -> bool:
        """Whether this plan is one of several that were made together."""
        return planned.key in self._keys

    @cached_property
    def _kinds(self) -> Kinds:
        from mempool.kinds import Kinds  # which few programs need

        return Kinds()

    def planned(self, now: Counts, occupied: int) -> None:
        """There is another plan; ``occupied``: allocations that found something in their place, ever."""
        self._allocations, self._occupied = now.allocations, occupied

    def collide(self, now: Counts, occupied: int) -> bool:
        """Whether that is why much was missed since the last plan; or anything, where they are together."""
        collisions, passed = occupied - self._occupied, now.allocations - self._allocations
        return collisions >= (1 if self._keys else max(LEAST_COLLISIONS, MOST_COLLIDING * passed))

    def are_due(self, known: Sequence[Planned], seen: Sequence[Pattern], iteration: int) -> bool:
        """Whether to plan these together, or again since one more is known or something lives longer."""
        if len(known) < 2:
            return False
        if len(known) > self._most:
            self._most, self._again = len(known), Rarely()
        self._kinds.note(seen, known)
        return self._again.may_be_done(iteration) and self._kinds.outgrew(known)

    def make(
        self, known: Sequence[Planned], iteration: int, make_plans: Callable[..., list[Planned] | None]
    ) -> list[Planned] | None:
        """Plans to replace these, one each; None: nobody knows how they follow, or it is of no use.

        Args:
            known: plans of each kind.
            iteration: now.
            make_plans: `mempool.kinds.make_plans` of these and what is known of them.
        """
        kinds = self._kinds.of(known)
        if kinds is None:
            return None
        self._again.is_done(iteration)
        made = make_plans(known, kinds)
        if made is None:
            return None
        self._kinds.are_planned(known, kinds)  # also where that is of no use
        most = MOST_TOGETHER * max(planned.plan.arena_bytes for planned in known)
        if max(planned.plan.arena_bytes for planned in made) > most:
            return None
        self._keys = {planned.key for planned in known}
        return made
