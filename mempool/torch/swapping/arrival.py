"""How the arena of the pool's plan comes, within the limit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mempool.logs import log
from mempool.report import NewOutcomes, sized
from mempool.torch.swapping.storages import AWAY, address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from mempool import _core
    from mempool.torch.swapping.governor import Governor
    from mempool.torch.swapping.iterations import Iterations
    from mempool.torch.swapping.mover import Mover
    from mempool.torch.swapping.room import Room
    from mempool.torch.swapping.storages import Held, Storages


#: Iterations, after which it is tried again at the latest.
_LONGEST_PAUSE = 64
#: By what part of the limit more may be held, rather than to have no arena; less than `Room.tell` tells of.
_LITTLE = 51


class Arrival:
    """Makes way for the arena.

    It takes what a whole iteration takes at once, beside all that lies elsewhere by then. So after an
    iteration by the pool's plan everything leaves once. What was there all the time comes back beside the
    arena; what else was there comes to the place in it that the plan has for it, and the next iteration is
    like those to come. Where all of it is more than the limit, moves are planned for less and the pool
    learns them anew.

    Attributes:
        due: whether to `take` it before the next operation.
    """

    def __init__(
        self,
        client: _core.Client,
        room: Room,
        storages: Storages,
        iterations: Iterations,
        governor: Governor,
        mover: Mover,
        anew: Callable[[], None],
    ) -> None:
        """Nothing is planned yet."""
        self._client, self._pool, self._room = client, client.pool, room
        self._storages = storages
        self._iterations, self._governor, self._mover = iterations, governor, mover
        self._anew = anew
        self._refused = 0  # bytes of the arena that cannot be had
        self._in_vain = self._told = False
        self._wanted = 0  # bytes of the arena that was missing when an iteration ended last
        self._new = NewOutcomes()
        self._pause, self._until = 1, 0  # iterations, before which nothing is done
        self.due = False

    def look(self) -> None:
        """An iteration has ended: is there a plan whose arena is not there, or in whose places others lie?"""
        needed, there = self._needed()
        occupied, without = self._misses()
        self._room.holds_arena = there > 0
        # One that is too small for another plan may do for this one.
        self._room.arena = 0 < needed <= there if needed != self._refused else there > 0 and not without
        self._room.asks |= not self._room.arena  # by now, which was not known when the iteration began
        missing = there < needed == self._wanted != self._refused
        self._wanted = needed
        self._until -= 1
        in_the_way = occupied and self._room.arena
        self.due = self._until <= 0 and self._iterations.by_plan and (in_the_way or missing)

    def _misses(self) -> tuple[bool, bool]:
        """Whether something lay in the plan's places in this iteration, and whether the arena was missing."""
        new = self._new.of(self._client.stats()["outcomes"])
        return new["occupied"] > 0, new["no_arena"] > 0

    def _needed(self) -> tuple[int, int]:
        return self._client.state()["needed_bytes"], self._pool.stats()["arena_bytes"]

    def take(self, keep: Container[int], now: int) -> None:
        """Have it, before an operation that is given what has these keys."""
        self.due = False
        stays, places = self._where()
        self._governor.clear(keep, now)
        needed, there = self._needed()
        short = self._short(stays, max(needed - there, 0))
        self._pause = self._until = min(2 * self._pause, _LONGEST_PAUSE)  # soon again, and ever more rarely
        if needed <= there:
            self.bring(stays if short <= 0 else [], places)
        elif self._had(short):
            self._room.arena = self._room.holds_arena = True
            self._room.begin(by_plan=self._iterations.served_by_plan)
            self.bring(stays, places)
        elif short <= 0 or not self._is_short(short):
            self.bring([*stays, *(held for held, _ in places)], [])  # all as it was
        self._iterations.undisturbed()

    def _is_short(self, short: int) -> bool:
        """So many bytes are missing: whether there are other moves now."""
        if not self._in_vain and self._iterations.less(short):
            self._pause, self._until = 1, 0
            self._anew()
            return True
        if not self._in_vain and short <= self._room.limit_bytes // _LITTLE:
            self._in_vain = True  # the next time it may be a little too large
        else:
            self._refused = self._needed()[0]
            self._tell(short)
        return False

    def _where(self) -> tuple[list[Held], list[tuple[Held, int]]]:
        """Of what is here, what was here all the time, and the place in the arena of what was not."""
        stays: list[Held] = []
        places: list[tuple[Held, int]] = []
        for held in list(self._storages.known.values()):
            if held.state == AWAY or (storage := held()) is None:
                continue
            place = self._client.place_of(address_of(storage))
            if place is None:
                stays.append(held)
            else:
                places.append((held, place))
        return stays, places

    def _had(self, short: int) -> bool:
        """Whether it has come. A little too large is better than none, if no moves take less."""
        if 0 < short <= self._room.limit_bytes // _LITTLE and self._in_vain:
            self._room.hold(self._room.limit_bytes + short)
            short = 0
        return short <= 0 and self._client.ask_for_arena()

    def _short(self, stays: list[Held], more: int) -> int:
        """Bytes that are missing for so many of the arena and what stays beside it."""
        stats = self._pool.stats()
        held: int = stats["reserved"]["current"] - stats["idle_bytes"]
        away = sum(held.room for held in stays if held.state == AWAY)
        return held + more + away - self._room.limit_bytes

    def bring(self, stays: list[Held], places: list[tuple[Held, int]]) -> None:
        """All back to where it belongs: that is no part of what recurs."""
        self._client.enter_dynamic()
        try:
            for held in stays:
                self._mover.fetch(held)
            for held, place in places:
                if held.state == AWAY:
                    self._client.place_next(place)
                    self._mover.fetch(held)
        finally:
            self._client.leave_dynamic()
        self._mover.settle_all()  # what is on its way does not end before, even if nobody needs it

    def _tell(self, short: int) -> None:
        """Warn once: other moves are refused arenas of other sizes, for the same reason."""
        log.log(
            logging.INFO if self._told else logging.WARNING,
            "an arena of %s cannot be had within the limit of %s, %s are missing: iterations go on without",
            sized(self._refused),
            sized(self._room.limit_bytes),
            sized(short),
        )
        self._told = True
