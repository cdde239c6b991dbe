"""Admission of the pool's arena within the limit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mempool.logs import log
from mempool.reporting.outcomes import NewOutcomes
from mempool.torch.eager.storages import OFFLOADED, address_of
from mempool.torch.offload.options import OPTIONS
from mempool.units import sized

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from mempool import _core
    from mempool.torch.eager.eviction_policy import EvictionPolicy
    from mempool.torch.eager.iterations import Iterations
    from mempool.torch.eager.pool_headroom import PoolHeadroom
    from mempool.torch.eager.storages import StorageRecord, StorageRegistry
    from mempool.torch.eager.transfers import TransferManager


class ArenaAdmission:
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
        room: PoolHeadroom,
        storages: StorageRegistry,
        iterations: Iterations,
        eviction: EvictionPolicy,
        transfers: TransferManager,
        anew: Callable[[], None],
    ) -> None:
        """Start without a plan."""
        self._client, self._pool, self._headroom = client, client.pool, room
        self._storages = storages
        self._iterations, self.eviction, self._transfers = iterations, eviction, transfers
        self._reset_plans = anew
        self._refused = 0  # size of the arena that was refused, bytes
        self._accepts_excess = self._has_warned = False
        self._needed_before = 0  # size needed at the end of the last iteration, bytes
        self._new_outcomes = NewOutcomes()
        self._pause, self._wait = 1, 0  # iterations to wait before the next attempt
        self.due = False

    def update(self) -> None:
        """Decide after an iteration whether to install an arena: none exists, or planned places are taken."""
        needed, there = self._arena_sizes()
        occupied, without = self._misses()
        self._headroom.holds_arena = there > 0
        # An arena that is too small for another plan may suffice for this plan.
        self._headroom.serves_schedule = (
            0 < needed <= there if needed != self._refused else there > 0 and not without
        )
        self._headroom.is_checked |= (
            not self._headroom.serves_schedule
        )  # `PoolHeadroom.begin` ran before `arena` was known
        missing = there < needed == self._needed_before != self._refused
        self._needed_before = needed
        self._wait -= 1
        in_the_way = occupied and self._headroom.serves_schedule
        self.due = self._wait <= 0 and self._iterations.holds_limit and (in_the_way or missing)

    @property
    def is_refused(self) -> bool:
        """Return whether the arena that is needed now cannot be had."""
        return 0 < self._refused == self._needed_before

    def _misses(self) -> tuple[bool, bool]:
        """Return two flags for this iteration: planned places were occupied; the arena was missing."""
        new = self._new_outcomes.of(self._client.stats()["outcomes"])
        return new["slot_occupied"] > 0, new["no_arena"] > 0

    def _arena_sizes(self) -> tuple[int, int]:
        return self._client.state()["needed_bytes"], self._pool.stats()["arena_bytes"]

    def install(self, keep: Container[int], now: int) -> None:
        """Install the arena before an operation; `keep`: keys of the storages among the arguments."""
        self.due = False
        stays, places = self._split_resident()
        self.eviction.clear(keep, now)
        needed, there = self._arena_sizes()
        short = self._missing_bytes(stays, max(needed - there, 0))
        self._pause = self._wait = min(2 * self._pause, OPTIONS.admission_max_pause)  # exponential backoff
        if needed <= there:
            self.reload_to_places(stays if short <= 0 else [], places)
        elif self._request_arena(short):
            self._headroom.serves_schedule = self._headroom.holds_arena = True
            self._headroom.begin(by_plan=self._iterations.is_final)
            self.reload_to_places(stays, places)
        elif short <= 0 or not self._handle_shortage(short):
            self.reload_to_places([*stays, *(record for record, _ in places)], [])  # undo the eviction
        self._iterations.ignore_evictions()

    def _handle_shortage(self, short: int) -> bool:
        """Handle an arena that lacks `short` bytes; return whether the moves were replanned."""
        if not self._accepts_excess and self._iterations.replan_lower(short):
            self._pause, self._wait = 1, 0
            self._reset_plans()
            return True
        if (
            not self._accepts_excess
            and short <= self._headroom.limit_bytes // OPTIONS.admission_excess_divisor
        ):
            self._accepts_excess = True  # the next attempt may exceed the limit a little
        else:
            self._refused = self._arena_sizes()[0]
            self._warn(short)
        return False

    def _split_resident(self) -> tuple[list[StorageRecord], list[tuple[StorageRecord, int]]]:
        """Return the persistent storages on the device, and the others with their places in the arena."""
        stays: list[StorageRecord] = []
        places: list[tuple[StorageRecord, int]] = []
        for record in list(self._storages.records.values()):
            if record.state == OFFLOADED or (storage := record()) is None:
                continue
            memory = storage if record.landing is None else record.landing
            place = self._client.planned_offset_of(address_of(memory))
            if place is None:
                stays.append(record)
            else:
                places.append((record, place))
        return stays, places

    def _request_arena(self, short: int) -> bool:
        """Request the arena and return the success; after vain replans, accept a small excess."""
        if (
            0 < short <= self._headroom.limit_bytes // OPTIONS.admission_excess_divisor
            and self._accepts_excess
        ):
            self._headroom.set_limit(self._headroom.limit_bytes + short)
            short = 0
        return short <= 0 and self._client.request_arena()

    def _missing_bytes(self, stays: list[StorageRecord], more: int) -> int:
        """Return the bytes that are missing for `more` bytes of arena and the storages outside the arena."""
        stats = self._pool.stats()
        record: int = stats["reserved"]["current"] - stats["idle_bytes"]
        away = sum(record.rounded_bytes for record in stays if record.state == OFFLOADED)
        return record + more + away - self._headroom.limit_bytes

    def reload_to_places(self, stays: list[StorageRecord], places: list[tuple[StorageRecord, int]]) -> None:
        """Reload all storages to their places; these allocations are no part of the recurring pattern."""
        self._client.enter_dynamic()
        try:
            for record in stays:
                self._transfers.reload(record)
            for record, place in places:
                if record.state == OFFLOADED:
                    self._client.allocate_next_at(place)
                    self._transfers.reload(record)
        finally:
            self._client.leave_dynamic()
        self._transfers.wait_all()  # transfers keep storages alive, even unused ones

    def _warn(self, short: int) -> None:
        """Warn once: replanned moves are refused arenas of other sizes, for the same reason."""
        log.log(
            logging.INFO if self._has_warned else logging.WARNING,
            "an arena of %s cannot be had within the limit of %s, %s are missing: iterations go on without",
            sized(self._refused),
            sized(self._headroom.limit_bytes),
            sized(short),
        )
        self._has_warned = True
