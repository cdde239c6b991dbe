"""When kinds of iterations are planned together: where what one leaves alive is in another one's way.

What is known of them, and the plans, are `mempool.kinds`'.
"""

from __future__ import annotations

import contextlib
import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING

from mempool.rest import Rarely

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from mempool.kinds import Kinds
    from mempool.plan_files import Saved
    from mempool.planned import Planned
    from mempool.rest import Counts
    from solvers.kinds import Kind
    from traces.pattern import Pattern

#: Since the last plan, so many allocations at least, and this share of all, found their places taken: a kept
#: tensor may do that, too.
LEAST_COLLISIONS, MOST_COLLIDING = 16, 1 / 512
#: Plans that are made together may need so many times as much as the largest apart did, or as is alive.
MOST_TOGETHER = 1.25


class Together:
    """Of one client's plans, those that were made together."""

    def __init__(self) -> None:
        """None were."""
        self._plans: list[Planned] = []
        #: By key, what these were made of; others may have been tried since.
        self._made_of: dict[bytes, Kind] = {}
        self._again = Rarely()
        self._allocations = self._occupied = 0  # when the last plan was made
        self._lately: set[bytes] = set()  # keys of kinds that were seen when that was looked at
        self._most = 0  # kinds that could be joined when that was looked at

    def __bool__(self) -> bool:
        return bool(self._plans)

    def have(self, planned: Planned) -> bool:
        """Whether this plan is one of several that were made together."""
        return any(planned is one for one in self._plans)

    @cached_property
    def _kinds(self) -> Kinds:
        from mempool.kinds import Kinds  # which few programs need

        return Kinds()

    @contextlib.contextmanager
    def anew(self, seen: Iterable[Pattern]) -> Iterator[Callable[[], None]]:
        """Meanwhile lifetimes are known from this only, and from then on if what it gives is called."""
        from mempool.kinds import Kinds

        before, kept = self._kinds, []
        self.__dict__["_kinds"] = Kinds(before)
        self._kinds.note(list(seen), ())
        try:
            yield lambda: kept.append(True)
        finally:
            if not kept:
                self.__dict__["_kinds"] = before

    def take_over(self, key: bytes, former: set[bytes]) -> None:
        """The plan of this key serves what those of these keys did, and takes their place."""
        if former:
            self._kinds.take_over(key, former)

    def planned(self, now: Counts, occupied: int) -> None:
        """There is another plan; ``occupied``: allocations that found something in their place, ever."""
        self._allocations, self._occupied = now.allocations, occupied

    def collide(self, now: Counts, occupied: int) -> bool:
        """Whether that is why much was missed since the last plan; or anything, where they are together."""
        collisions, passed = occupied - self._occupied, now.allocations - self._allocations
        return collisions >= (1 if self._plans else max(LEAST_COLLISIONS, MOST_COLLIDING * passed))

    def joined(self, known: Iterable[Planned]) -> list[Planned]:
        """Of these, those to be made together: of kinds that came lately, or that are together already."""
        may = [planned for planned in known if self._kinds.can_be_joined(planned)]
        return [planned for planned in may if planned.key in self._lately or self.have(planned)]

    def are_due(self, known: Sequence[Planned], seen: Sequence[Pattern], iteration: int) -> bool:
        """Whether to plan these together, or again since one more is known or something lives longer."""
        self._kinds.note(seen, known)
        self._lately = {pattern.key for pattern in seen}
        joined = self.joined(known)
        if len(joined) < 2:
            return False
        if len(joined) > self._most:
            self._most, self._again = len(joined), Rarely()
        if not self._again.may_be_done(iteration):
            return False
        apart = bool(self._plans) and not all(map(self.have, joined))
        return apart or self._kinds.outgrew(joined)

    def make(
        self, known: Sequence[Planned], iteration: int, make_plans: Callable[..., list[Planned] | None]
    ) -> list[Planned] | None:
        """Plans to replace these, one each; None: there is too much to pack, or it was interrupted.

        Args:
            known: plans of kinds that can be planned together.
            iteration: now.
            make_plans: `mempool.kinds.make_plans` of these and what is known of them.
        """
        self._again.is_done(iteration)
        kinds = self._kinds.of(known)
        made = None if kinds is None else make_plans(known, kinds)
        if kinds is None or made is None:
            return None
        self._kinds.are_planned(known, kinds)  # also where they are of no use
        return made

    def are_worth_it(self, made: Sequence[Planned], known: Sequence[Planned]) -> bool:
        """Whether plans just made need not much more memory than these, or than is alive at a time."""
        now, before = (max(one.plan.arena_bytes for one in plans) for plans in (made, known))
        return now <= before or now <= MOST_TOGETHER * max(self._kinds.load(), 0 if self else before)

    def are(self, made: Sequence[Planned]) -> None:
        """These, which were made last, are in effect."""
        self._plans = list(made)
        self._made_of = self._kinds.planned()

    def kinds(self, known: Sequence[Planned]) -> dict[int, Kind]:
        """Of these, those that are together, as they were planned; by their number."""
        numbers = {planned.key: number for number, planned in enumerate(known) if self.have(planned)}
        columns = [column for column, key in enumerate(self._made_of) if key in numbers]
        if len(columns) < 2:  # the others are no longer known
            return {}
        return {
            numbers[key]: dataclasses.replace(kind, reach=kind.reach[:, columns])
            for key, kind in self._made_of.items()
            if key in numbers
        }

    def load(self, known: Sequence[Planned], kinds: Mapping[int, Kind]) -> None:
        """These are in effect; some were made together in another process, where `kinds` gave this."""
        if kinds:
            plans = [known[number] for number in kinds]
            self._kinds.take_up(plans, list(kinds.values()))
            self.are(plans)


def plan_together(
    made: Sequence[Planned], *, wait_bytes: int, interrupt: Callable[[], bool] | None = None
) -> Saved | None:
    """Plans of kinds that each may follow any other, instead of these, which were made one by one.

    Args:
        made: plans of all kinds of a finished recording, with one alignment.
        wait_bytes: bytes that a plan must save for each wait of one stream for another.
        interrupt: asked now and then whether to stop.

    Returns:
        One for each of ``made``, in their order; None: nothing is known of what follows what, there is too
        much to pack, it was interrupted before there was any, or all need clearly more memory so.
    """
    from mempool.kinds import make_plans
    from mempool.plan_files import Saved

    together = Together()
    if not together.are_due(made, [planned.pattern for planned in made], 0):
        return None
    joined = together.joined(made)
    alignment = int(made[0].buffers.alignment.max(initial=1))
    new = together.make(
        joined,
        0,
        lambda known, kinds: make_plans(
            known, kinds, alignment=alignment, wait_bytes=wait_bytes, patient=True, interrupt=interrupt
        ),
    )
    if new is None or not together.are_worth_it(new, joined):
        return None
    together.are(new)
    instead = {planned.key: planned for planned in new}
    plans = [instead.get(planned.key, planned) for planned in made]
    return Saved(plans, together.kinds(plans))
