"""Admission of the pool's arena within the limit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mempool.logs import log
from mempool.reporting.outcomes import NewOutcomes, missed
from mempool.torch.eager.storages import OFFLOADED, address_of
from mempool.torch.offload.options import OPTIONS
from mempool.units import sized

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool import _core
    from mempool.torch.eager.eviction_policy import EvictionPolicy
    from mempool.torch.eager.iterations import Iterations
    from mempool.torch.eager.patterns import OffloadPattern
    from mempool.torch.eager.pool_headroom import PoolHeadroom
    from mempool.torch.eager.storages import StorageRecord, StorageRegistry
    from mempool.torch.eager.transfers import TransferManager


class ArenaAdmission:
    """Installation of the pool's arena within the limit.

    An arena has the peak size of a whole iteration, and coexists with all memory outside the arena. So after
    an iteration that followed the schedule, all storages are evicted once. Persistent storages are then
    reloaded outside the arena, the others at their planned addresses in the arena, so that all later
    iterations use the same addresses. If arena and other memory exceed the limit, the schedule is replanned
    for a lower limit, and the pool learns the new moves.

    An iteration of another pattern, such as an evaluation, leaves storages at other addresses. So the
    addresses at the end of a scheduled iteration are remembered, and restored after other iterations.

    Attributes:
        due: whether to call `install` before the next operation.
        restores: whether `install` restores addresses instead of installing an arena.
    """

    def __init__(
        self,
        client: _core.Client,
        room: PoolHeadroom,
        storages: StorageRegistry,
        iterations: Iterations,
        eviction: EvictionPolicy,
        transfers: TransferManager,
        reset_plans: Callable[..., None],
    ) -> None:
        """Start without a plan."""
        self._client, self._pool, self._headroom = client, client.pool, room
        self._storages = storages
        self._iterations, self.eviction, self._transfers = iterations, eviction, transfers
        self._reset_plans = reset_plans
        self._shortages = 0
        self._refused = 0  # size of the arena that was refused, bytes
        self._accepts_excess = self._has_warned = False
        self._needed_before = 0  # size needed at the end of the last iteration, bytes
        self._new_outcomes = NewOutcomes()
        self._pause, self._wait = 1, 0  # iterations to wait before the next attempt
        self.restores = False  # instead of installing an arena
        self.due = False

    def update(self, followed: OffloadPattern | None) -> None:
        """Decide after an iteration whether to install an arena: none exists, or planned slots are occupied.

        Args:
            followed: the pattern that the whole iteration followed, if its moves are final.
        """
        needed, there = self._arena_sizes()
        new = self._new_outcomes.of(self._client.stats()["outcomes"])
        occupied, without = new["slot_occupied"] > 0, new["no_arena"] > 0
        hits, misses = new["hit"], missed(new)
        pattern = self._iterations.pattern
        for one in (followed, pattern):
            if one is not None and one.arena_bytes != there:
                one.forget_places(there)
        if followed is not None:
            followed.is_served |= hits > OPTIONS.served_hits_per_miss * misses
        self._headroom.holds_arena = there > 0
        # An arena that is too small for another plan may suffice for this plan.
        has_places = self._headroom.has_places = needed > 0 and (
            needed <= there if needed != self._refused else there > 0 and not without
        )
        self._headroom.serves_schedule = has_places and pattern is not None and pattern.is_served
        self._headroom.is_checked |= (
            not self._headroom.serves_schedule
        )  # `PoolHeadroom.begin` ran before `arena` was known
        missing = there < needed == self._needed_before != self._refused
        if missing and not self._may_fit(needed):
            missing, self._refused = False, needed
        self._needed_before = needed
        self._wait -= 1
        self.due = self._wait <= 0 and self._iterations.holds_limit and ((occupied and has_places) or missing)
        if pattern is not None:
            is_clean = followed is not None and hits > 0 == misses
            if self.restores and pattern is followed and not is_clean:
                pattern.homes = {}  # to no effect
            self.restores = bool(pattern.homes) and not is_clean and not self.restores
            self.due |= self.restores and self._iterations.holds_limit
            if pattern is followed and is_clean and not pattern.homes:
                pattern.homes = {record.number: self._home(record) for record in self._resident()}

    def begin_iteration(self) -> None:
        """Schedule a restore of addresses if the program used storages between two iterations."""
        pattern = self._iterations.pattern
        self.restores = pattern is not None and bool(pattern.homes) and self._iterations.holds_limit
        self.due |= self.restores

    def _may_fit(self, needed: int) -> bool:
        """Return whether a larger arena and the storages outside the arena may fit within the limit."""
        pattern = self._iterations.pattern
        if pattern is None or not pattern.homes:
            return True
        outside = sum(
            record.rounded_bytes
            for record in self._resident()
            if pattern.homes.get(record.number, (0, None))[1] is None
        )
        return needed + outside <= self._headroom.limit_bytes

    @property
    def is_refused(self) -> bool:
        """Return whether an arena of the size needed now was refused."""
        return 0 < self._refused == self._needed_before

    def _arena_sizes(self) -> tuple[int, int]:
        return self._client.state()["needed_bytes"], self._pool.stats()["arena_bytes"]

    def install(self, now: int) -> None:
        """Install the arena before operation number `now`; even that operation's arguments may be evicted."""
        self.due = False
        if self.restores:
            self._restore(now)
            return
        stays, places = self._split_resident()
        self.eviction.clear((), now)
        needed, there = self._arena_sizes()
        short = self._missing_bytes(stays, max(needed - there, 0))
        self._pause = self._wait = min(2 * self._pause, OPTIONS.admission_max_pause)  # exponential backoff
        if needed <= there:
            self.reload_to_places(stays if short <= 0 else [], places)
        elif self._request_arena(short):
            self._headroom.has_places = self._headroom.serves_schedule = self._headroom.holds_arena = True
            self._headroom.begin(by_plan=self._iterations.is_final)
            self.reload_to_places(stays, places)
        elif short <= 0 or not self._handle_shortage(short):
            self.reload_to_places([*stays, *(record for record, _ in places)], [])  # undo the eviction
        self._iterations.ignore_evictions()

    def _handle_shortage(self, short: int) -> bool:
        """Handle an arena that lacks `short` bytes; return whether the moves were replanned."""
        if not self._accepts_excess and self._iterations.replan_lower(short):
            self._pause, self._wait = 1, 0
            self._shortages += 1
            # The remembered addresses of one iteration are not those of the next if layouts alternate.
            self._reset_plans(alternate=self._shortages > 1)
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
        for record in self._resident():
            if (place := self._home(record)[1]) is None:
                stays.append(record)
            else:
                places.append((record, place))
        return stays, places

    def _resident(self) -> list[StorageRecord]:
        self._transfers.end_native_moves()
        return [
            record
            for record in list(self._storages.records.values())
            if record.state != OFFLOADED and record() is not None
        ]

    def _home(self, record: StorageRecord) -> tuple[int, int | None]:
        """Return a storage's device address, and the offset in the arena if the storage is planned there."""
        address = address_of(record() if record.landing is None else record.landing)
        return address, self._client.planned_offset_of(address)

    def _restore(self, now: int) -> None:
        """Reload storages at their addresses after a scheduled iteration, and evict all others."""
        self._transfers.end_native_moves()
        stays: list[StorageRecord] = []
        places: list[tuple[StorageRecord, int]] = []
        pattern, at_home = self._iterations.pattern, set[int]()
        homes = {} if pattern is None else pattern.homes
        for record in list(self._storages.records.values()):
            if record() is None or (home := homes.get(record.number)) is None:
                continue
            address, place = home
            if record.state != OFFLOADED and self._home(record)[0] == address:
                at_home.add(record.key)
            elif place is None:
                stays.append(record)
            else:
                places.append((record, place))
        self.eviction.clear(at_home, now)
        self.reload_to_places(stays, places)
        self._iterations.ignore_evictions()

    def _request_arena(self, short: int) -> bool:
        """Request the arena and return whether the pool installed one.

        Once replans failed, accept a small excess.
        """
        if (
            0 < short <= self._headroom.limit_bytes // OPTIONS.admission_excess_divisor
            and self._accepts_excess
        ):
            self._headroom.set_limit(self._headroom.limit_bytes + short)
            short = 0
        return short <= 0 and self._client.request_arena()

    def _missing_bytes(self, stays: list[StorageRecord], more: int) -> int:
        """Return the bytes by which `more` bytes of arena and the storages outside it exceed the limit."""
        stats = self._pool.stats()
        record: int = stats["reserved"]["current"] - stats["idle_bytes"]
        away = sum(record.rounded_bytes for record in stays if record.state == OFFLOADED)
        return record + more + away - self._headroom.limit_bytes

    def reload_to_places(self, stays: list[StorageRecord], places: list[tuple[StorageRecord, int]]) -> None:
        """Reload all storages to their places; these allocations are no part of the recurring pattern."""
        self._client.enter_dynamic()
        try:
            for record in stays:
                if not self.restores or record.rounded_bytes <= self._headroom.remaining_bytes():
                    self._transfers.reload(record)
            for record, place in places:
                if record.state == OFFLOADED:
                    self._client.allocate_next_at(place)
                    self._transfers.reload(record)
        finally:
            self._client.leave_dynamic()
        self._transfers.wait_all()  # transfers keep storages alive, even unused ones

    def _warn(self, short: int) -> None:
        """Warn once: after a replan, an arena of another size is refused for the same reason."""
        log.log(
            logging.INFO if self._has_warned else logging.WARNING,
            "an arena of %s cannot be had within the limit of %s, %s are missing: iterations go on without",
            sized(self._refused),
            sized(self._headroom.limit_bytes),
            sized(short),
        )
        self._has_warned = True
