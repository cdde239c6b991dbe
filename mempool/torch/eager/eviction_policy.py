"""Eviction policy: the choice of the storages that are evicted when room is needed at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool.torch.eager.storages import AWAY, COMING

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from mempool.torch.eager.pool_headroom import Room
    from mempool.torch.eager.report import SwapCounts
    from mempool.torch.eager.storages import Held, Storages
    from mempool.torch.eager.transfers import Mover

#: Divisor of the limit: smaller storages are evicted last, since copies have a fixed cost.
_SMALL = 4096
#: Divisor of the limit: without a plan, that share of the next eviction candidates is copied beforehand.
_AHEAD = 16


class Governor:
    """Eviction policy that keeps the resident bytes within a limit where no plan does.

    The storage with the farthest next use is evicted first (Belady, "A study of replacement algorithms for a
    virtual-storage computer", 1966), with the distance weighted by the cost in copies: one copy if the host
    copy is still good, else two.
    """

    def __init__(
        self,
        storages: Storages,
        mover: Mover,
        counts: SwapCounts,
        limit_bytes: int,
        until: Callable[[Held], int | None] = lambda _: None,
        room: Room | None = None,
    ) -> None:
        """Create the policy.

        Args:
            storages: registry of all storages.
            mover: offloads and reloads storages.
            counts: counters of evictions.
            limit_bytes: most resident bytes.
            until: number of operations until the next use of a storage, or None if unknown: then the number
                of operations since the last use is taken, since a backward pass uses last the storages that
                the forward pass used first.
            room: headroom of the pool, if there is a pool.
        """
        self._storages = storages
        self._mover = mover
        self._counts = counts
        self._until = until
        self._room = room
        self.limit_bytes = limit_bytes

    @property
    def spare(self) -> int:
        """Return the free bytes within the limit."""
        spare = self.limit_bytes - self._storages.here_bytes
        room = self._room
        return spare if room is None or not room.asks else min(spare, room.left())

    def make_room(self, need: int, keep: Container[int], now: int, *, ahead: bool = False) -> bool:
        """Evict storages until `need` bytes fit.

        Args:
            need: bytes.
            keep: keys of storages that must stay.
            now: number of the operation, counted over all iterations.
            ahead: also start copies of the next eviction candidates.

        Returns:
            Whether `need` bytes fit.
        """
        missing = need - self.spare
        if missing <= 0:
            return True
        order = self._order(keep, now)
        while order and missing > 0:
            leaving = _enough(order, missing)
            self._evict(leaving)
            gone = {held.key for held in leaving}
            order = [held for held in order if held.key not in gone]
            missing = need - self.spare
        if ahead:
            self._copy_ahead(order)
        self._counts.over += missing > 0
        return missing <= 0

    def clear(self, keep: Container[int], now: int) -> bool:
        """Evict all storages except these keys; return whether any was evicted."""
        before = self._storages.here_bytes
        self._evict(self._order(keep, now))
        return self._storages.here_bytes < before

    def _evict(self, leaving: list[Held]) -> None:
        for held in leaving:  # start all offloads before waiting for the first
            self._mover.leave(held)
        for held in leaving:
            self._mover.release(held)
            self._counts.evicted += held.state == AWAY

    def _order(self, keep: Container[int], now: int) -> list[Held]:
        """Return the eviction candidates, first to evict first; storages being reloaded come last."""
        small = self.limit_bytes // _SMALL

        def rank(held: Held) -> tuple[bool, bool, int]:
            until = self._until(held)
            distance = now - held.last if until is None else until
            return held.state == COMING, held.room < small, -distance * (2 if held.clean else 1)

        return sorted(
            (
                held
                for held in list(self._storages.known.values())
                if held.movable and held.state != AWAY and held.key not in keep
            ),
            key=rank,
        )

    def _copy_ahead(self, order: list[Held]) -> None:
        room = self.limit_bytes // _AHEAD
        for held in order:
            if room <= 0 or held.state == COMING:
                return
            self._mover.leave(held)  # no effect if a good copy exists or is under way
            room -= held.room


def _enough(order: list[Held], missing: int) -> list[Held]:
    """Return the first candidates that free `missing` bytes, without those that prove superfluous."""
    first: list[Held] = []
    for held in order:
        if missing <= 0:
            break
        first.append(held)
        missing -= held.room
    chosen: list[Held] = []
    for held in reversed(first):  # keep the storages used sooner
        if held.room <= -missing:
            missing += held.room
        else:
            chosen.append(held)
    return chosen[::-1]
