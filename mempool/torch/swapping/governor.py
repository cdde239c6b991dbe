"""What leaves when room is needed at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool.torch.swapping.storages import AWAY, COMING

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from mempool.torch.swapping.mover import Mover
    from mempool.torch.swapping.report import SwapCounts
    from mempool.torch.swapping.room import Room
    from mempool.torch.swapping.storages import Held, Storages

#: Storages below this part of the limit leave last: copies have a price of their own.
_SMALL = 4096
#: Where no plan is followed, copies of what would leave next are made beforehand, for this part of the limit.
_AHEAD = 16


class Governor:
    """Keeps what is here within a limit where no plan does.

    First leaves what is farthest from its next use (Belady, "A study of replacement algorithms for a
    virtual-storage computer", 1966), in proportion to the copies that it costs: one if the host's copy is
    still good, else two.
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
        """Keep the limit.

        Args:
            storages: all.
            mover: moves them.
            counts: what was done.
            limit_bytes: the most that may be here.
            until: how many operations later a storage is used next, None where nobody knows: then as many as
                it was not used for. Training uses in its backward last what it used in its forward first.
            room: that of the pool, if there is one.
        """
        self._storages = storages
        self._mover = mover
        self._counts = counts
        self._until = until
        self._room = room
        self.limit_bytes = limit_bytes

    @property
    def spare(self) -> int:
        """Bytes for which there is room."""
        spare = self.limit_bytes - self._storages.here_bytes
        room = self._room
        return spare if room is None or not room.asks else min(spare, room.left())

    def make_room(self, need: int, keep: Container[int], now: int, *, ahead: bool = False) -> bool:
        """Let leave what it takes for so many bytes to fit, but none of these keys.

        Args:
            need: bytes.
            keep: keys of storages that stay.
            now: number of the operation, counted over all iterations.
            ahead: also copy what would leave next.

        Returns:
            Whether they fit.
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
        """Let everything leave but these keys; whether anything did."""
        before = self._storages.here_bytes
        self._evict(self._order(keep, now))
        return self._storages.here_bytes < before

    def _evict(self, leaving: list[Held]) -> None:
        for held in leaving:  # all copies are on their way before the first is waited for
            self._mover.leave(held)
        for held in leaving:
            self._mover.release(held)
            self._counts.evicted += held.state == AWAY

    def _order(self, keep: Container[int], now: int) -> list[Held]:
        """What may leave, the first to leave first; what is just coming last."""
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
            self._mover.leave(held)  # does nothing where there is a good copy, or one on its way
            room -= held.room


def _enough(order: list[Held], missing: int) -> list[Held]:
    """The first of them that make so many bytes, without those that turn out not to be needed for it."""
    first: list[Held] = []
    for held in order:
        if missing <= 0:
            break
        first.append(held)
        missing -= held.room
    chosen: list[Held] = []
    for held in reversed(first):  # rather what is used sooner stays
        if held.room <= -missing:
            missing += held.room
        else:
            chosen.append(held)
    return chosen[::-1]
