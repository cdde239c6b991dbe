"""Admission of the pool's arena within the limit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mempool.logs import log
from mempool.reporting.outcomes import NewOutcomes
from mempool.torch.eager.storages import AWAY, address_of
from mempool.units import sized

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from mempool import _core
    from mempool.torch.eager.eviction_policy import Governor
    from mempool.torch.eager.iterations import Iterations
    from mempool.torch.eager.pool_headroom import Room
    from mempool.torch.eager.storages import Held, Storages
    from mempool.torch.eager.transfers import Mover


#: Most iterations between two attempts.
_LONGEST_PAUSE = 64
#: Divisor of the limit: an excess up to that share is accepted rather than no arena; the share is less than
#: the excess that `Room.tell` reports.
_LITTLE = 51


class Arrival:
    """Makes room for the arena.

    An arena takes the peak of a whole iteration, in addition to all memory outside of the arena at that time.
    So after an iteration by plan, all storages are evicted once. Persistent storages then return outside the
    arena; the others return to their planned places in the arena, so the next iteration is like all later
    ones. If all of this exceeds the limit, the moves are replanned for less and the pool learns the new
    moves.

    Attributes:
        due: whether to call `take` before the next operation.
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
        """Start without a plan."""
        self._client, self._pool, self._room = client, client.pool, room
        self._storages = storages
        self._iterations, self._governor, self._mover = iterations, governor, mover
        self._anew = anew
        self._refused = 0  # size of the arena that was refused, bytes
        self._in_vain = self._told = False
        self._wanted = 0  # size needed at the end of the last iteration, bytes
        self._new = NewOutcomes()
        self._pause, self._until = 1, 0  # iterations to wait before the next attempt
        self.due = False

    def look(self) -> None:
        """Decide after an iteration whether to install an arena: none exists, or planned places are taken."""
        needed, there = self._needed()
        occupied, without = self._misses()
        self._room.holds_arena = there > 0
        # An arena that is too small for another plan may suffice for this plan.
        self._room.arena = 0 < needed <= there if needed != self._refused else there > 0 and not without
        self._room.asks |= not self._room.arena  # `Room.begin` ran before `arena` was known
        missing = there < needed == self._wanted != self._refused
        self._wanted = needed
        self._until -= 1
        in_the_way = occupied and self._room.arena
        self.due = self._until <= 0 and self._iterations.by_plan and (in_the_way or missing)

    def _misses(self) -> tuple[bool, bool]:
        """Return two flags for this iteration: planned places were occupied; the arena was missing."""
        new = self._new.of(self._client.stats()["outcomes"])
        return new["slot_occupied"] > 0, new["no_arena"] > 0

    def _needed(self) -> tuple[int, int]:
        return self._client.state()["needed_bytes"], self._pool.stats()["arena_bytes"]

    def take(self, keep: Container[int], now: int) -> None:
        """Install the arena before an operation; `keep`: keys of the storages among the arguments."""
        self.due = False
        stays, places = self._where()
        self._governor.clear(keep, now)
        needed, there = self._needed()
        short = self._short(stays, max(needed - there, 0))
        self._pause = self._until = min(2 * self._pause, _LONGEST_PAUSE)  # exponential backoff
        if needed <= there:
            self.bring(stays if short <= 0 else [], places)
        elif self._had(short):
            self._room.arena = self._room.holds_arena = True
            self._room.begin(by_plan=self._iterations.served_by_plan)
            self.bring(stays, places)
        elif short <= 0 or not self._is_short(short):
            self.bring([*stays, *(held for held, _ in places)], [])  # undo the eviction
        self._iterations.undisturbed()

    def _is_short(self, short: int) -> bool:
        """Handle an arena that lacks `short` bytes; return whether the moves were replanned."""
        if not self._in_vain and self._iterations.less(short):
            self._pause, self._until = 1, 0
            self._anew()
            return True
        if not self._in_vain and short <= self._room.limit_bytes // _LITTLE:
            self._in_vain = True  # the next attempt may exceed the limit a little
        else:
            self._refused = self._needed()[0]
            self._tell(short)
        return False

    def _where(self) -> tuple[list[Held], list[tuple[Held, int]]]:
        """Return the persistent storages on the device, and the others with their places in the arena."""
        stays: list[Held] = []
        places: list[tuple[Held, int]] = []
        for held in list(self._storages.known.values()):
            if held.state == AWAY or (storage := held()) is None:
                continue
            place = self._client.planned_offset_of(address_of(storage))
            if place is None:
                stays.append(held)
            else:
                places.append((held, place))
        return stays, places

    def _had(self, short: int) -> bool:
        """Request the arena and return the success; after vain replans, accept a small excess."""
        if 0 < short <= self._room.limit_bytes // _LITTLE and self._in_vain:
            self._room.hold(self._room.limit_bytes + short)
            short = 0
        return short <= 0 and self._client.request_arena()

    def _short(self, stays: list[Held], more: int) -> int:
        """Return the bytes that are missing for `more` bytes of arena and the storages outside the arena."""
        stats = self._pool.stats()
        held: int = stats["reserved"]["current"] - stats["idle_bytes"]
        away = sum(held.room for held in stays if held.state == AWAY)
        return held + more + away - self._room.limit_bytes

    def bring(self, stays: list[Held], places: list[tuple[Held, int]]) -> None:
        """Reload all storages to their places; these allocations are no part of the recurring pattern."""
        self._client.enter_dynamic()
        try:
            for held in stays:
                self._mover.fetch(held)
            for held, place in places:
                if held.state == AWAY:
                    self._client.allocate_next_at(place)
                    self._mover.fetch(held)
        finally:
            self._client.leave_dynamic()
        self._mover.settle_all()  # transfers keep storages alive, even unused ones

    def _tell(self, short: int) -> None:
        """Warn once: replanned moves are refused arenas of other sizes, for the same reason."""
        log.log(
            logging.INFO if self._told else logging.WARNING,
            "an arena of %s cannot be had within the limit of %s, %s are missing: iterations go on without",
            sized(self._refused),
            sized(self._room.limit_bytes),
            sized(short),
        )
        self._told = True
