"""What leaves when room is needed at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool.torch.swapping.storages import AWAY, COMING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mempool.torch.swapping.mover import Mover
    from mempool.torch.swapping.report import SwapCounts
    from mempool.torch.swapping.storages import Held, Storages


class Governor:
    """Keeps what is here within a limit where no plan does."""

    def __init__(self, storages: Storages, mover: Mover, counts: SwapCounts, limit_bytes: int) -> None:
        self._storages = storages
        self._mover = mover
        self._counts = counts
        self.limit_bytes = limit_bytes

    def make_room(self, need: int, given: Iterable[Held]) -> None:
        """Let what was unused for longest leave until so many bytes fit, but nothing that is given."""
        storages = self._storages
        if storages.here_bytes + need <= self.limit_bytes:
            return
        keep = {held.key for held in given}
        for held in sorted(storages.known.values(), key=lambda held: held.last):
            if storages.here_bytes + need <= self.limit_bytes:
                return
            if held.key in keep or not held.movable or held.state in (AWAY, COMING):
                continue
            self._mover.leave(held)
            self._mover.release(held)
            self._counts.evicted += 1
        if storages.here_bytes + need > self.limit_bytes:
            self._counts.over += 1
