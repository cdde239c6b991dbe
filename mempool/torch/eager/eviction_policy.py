"""Eviction policy: chooses the storages to evict when memory is needed at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mempool.torch.eager.storages import OFFLOADED, RELOADING, RESIDENT
from mempool.torch.offload.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from mempool.torch.eager.pool_headroom import PoolHeadroom
    from mempool.torch.eager.storages import StorageRecord, StorageRegistry
    from mempool.torch.eager.transfers import OffloadCounters, TransferManager


class EvictionPolicy:
    """Eviction policy that holds a limit of resident bytes in iterations without a schedule.

    The storage with the farthest next use is evicted first (Belady, "A study of replacement algorithms for a
    virtual-storage computer", 1966), with the distance weighted by the cost in copies: one copy if the host
    copy is still good, else two.
    """

    def __init__(
        self,
        storages: StorageRegistry,
        transfers: TransferManager,
        counts: OffloadCounters,
        limit_bytes: int,
        until: Callable[[StorageRecord], int | None] = lambda _: None,
        room: PoolHeadroom | None = None,
    ) -> None:
        """Create the policy.

        Args:
            storages: registry of all storages.
            transfers: offloads and reloads storages.
            counts: counters of evictions.
            limit_bytes: most resident bytes.
            until: returns the number of operations until the next use of a storage, or None if unknown. The
                policy then takes the number of operations since the last use: a backward pass uses the
                storages in the reverse order of the forward pass.
            room: headroom of the pool, if there is a pool.
        """
        self._storages = storages
        self._transfers = transfers
        self._counts = counts
        self._next_use = until
        self._headroom = room
        self.limit_bytes = limit_bytes

    @property
    def spare_bytes(self) -> int:
        """Return the free bytes within the limit."""
        spare = self.limit_bytes - self._storages.resident_bytes
        room = self._headroom
        return spare if room is None or not room.is_checked else min(spare, room.remaining_bytes())

    def make_room(self, need: int, keep: Container[int], now: int, *, ahead: bool = False) -> bool:
        """Evict storages until `need` bytes fit.

        Args:
            need: bytes.
            keep: keys of storages that must stay.
            now: number of the operation, counted over all iterations.
            ahead: whether to start host copies of the next eviction candidates, too.

        Returns:
            Whether `need` bytes fit.
        """
        missing = need - self.spare_bytes
        if missing <= 0:
            return True
        order = self.candidates(keep, now)
        while order and missing > 0:
            leaving = victims(order, missing)
            self._evict(leaving)
            gone = {record.key for record in leaving}
            order = [record for record in order if record.key not in gone]
            missing = need - self.spare_bytes
        if ahead:
            self._copy_ahead(order)
        return missing <= 0

    def admit(self, needed: int, given: list[StorageRecord], now: int, *, ahead: bool) -> None:
        """Reload the arguments of an operation, and make room for `needed` bytes of results.

        Raises:
            torch.OutOfMemoryError: a reload finds no memory after all other storages were evicted.
        """
        keys = {record.key: record for record in given}
        absent = [record for record in keys.values() if record.state != RESIDENT]
        room = needed + _offloaded_bytes(absent)
        if room > self.spare_bytes and not self.make_room(room, keys, now, ahead=ahead):
            # A single live argument would keep the whole arena. A capture forbids the return of memory.
            if self._headroom is not None and self._headroom.holds_arena and not self._transfers.captures:
                self.clear((), now)
                self._headroom.give_back()
                absent = [record for record in keys.values() if record.state != RESIDENT]
            self._counts.over_limit += needed + _offloaded_bytes(absent) > self.spare_bytes
        if not absent:
            return
        try:
            self._transfers.reload_each(absent)
        except torch.OutOfMemoryError:
            if not self.clear(keys, now):
                raise
            self._transfers.reload_each(absent)
        if needed > self.spare_bytes:  # a reload may have split the arena's largest hole
            self.make_room(needed, keys, now)

    def clear(self, keep: Container[int], now: int) -> bool:
        """Evict all storages except these keys; return whether any was evicted."""
        before = self._storages.resident_bytes
        self._evict(self.candidates(keep, now))
        return self._storages.resident_bytes < before

    def _evict(self, leaving: list[StorageRecord]) -> None:
        for record in leaving:  # start all offloads before waiting for the first
            self._transfers.offload(record)
        for record in leaving:
            self._transfers.release(record)
            self._counts.evicted += record.state == OFFLOADED

    def candidates(self, keep: Container[int], now: int) -> list[StorageRecord]:
        """Return the eviction candidates in the order of eviction; storages under reload are last."""
        small = self.limit_bytes // OPTIONS.small_storage_divisor

        def rank(record: StorageRecord) -> tuple[bool, bool, int]:
            until = self._next_use(record)
            distance = now - record.last if until is None else until
            return (
                record.state == RELOADING,
                record.rounded_bytes < small,
                -distance * (2 if record.has_valid_copy else 1),
            )

        return sorted(
            (
                record
                for record in list(self._storages.records.values())
                if record.movable and record.state != OFFLOADED and record.key not in keep
            ),
            key=rank,
        )

    def _copy_ahead(self, order: list[StorageRecord]) -> None:
        room = self.limit_bytes // OPTIONS.copy_ahead_divisor
        for record in order:
            if room <= 0 or record.state == RELOADING:
                return
            self._transfers.offload(record)  # no effect if a good copy exists or is under way
            room -= record.rounded_bytes


def _offloaded_bytes(records: list[StorageRecord]) -> int:
    return sum(record.rounded_bytes for record in records if record.state == OFFLOADED)


def victims(order: list[StorageRecord], missing: int) -> list[StorageRecord]:
    """Return the first candidates that together free `missing` bytes, without superfluous candidates."""
    first: list[StorageRecord] = []
    for record in order:
        if missing <= 0:
            break
        first.append(record)
        missing -= record.rounded_bytes
    chosen: list[StorageRecord] = []
    for record in reversed(first):  # keep the storages used sooner
        if record.rounded_bytes <= -missing:
            missing += record.rounded_bytes
        else:
            chosen.append(record)
    return chosen[::-1]
