"""Moves of storages between the device and the host, each safe at any moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._C import _DisableTorchDispatch

from mempool.torch.swapping.engine import HostFullError
from mempool.torch.swapping.storages import AWAY, COMING, HERE, LEAVING, Held, Storages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mempool.torch.swapping.engine import Engine
    from mempool.torch.swapping.report import SwapCounts


class Mover:
    """Moves storages, one at a time, and keeps what `storages` says of them true."""

    def __init__(self, engine: Engine, device: torch.device, storages: Storages, counts: SwapCounts) -> None:
        self._engine = engine
        self._device = device
        self._storages = storages
        self._counts = counts
        self._moving: dict[int, Held] = {}

    def _data(self, held: Held) -> torch.Tensor:
        storage = held()
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def leave(self, held: Held) -> None:
        """Ask for a copy to the host."""
        if held.state != HERE or not held.movable or held.clean:
            return
        with _DisableTorchDispatch(), torch.no_grad():
            if held.copy is not None:
                self._engine.drop(held.copy)
                held.copy = None
            try:
                held.copy, held.transfer = self._engine.out(self._data(held))
            except HostFullError:
                self._counts.host_full += 1
                return
        held.state, held.clean = LEAVING, True
        self._moving[held.number] = held
        self._counts.out_bytes += held.size

    def release(self, held: Held) -> None:
        """Give its memory back, once its copy is there."""
        self.settle(held)
        if held.state == HERE and held.clean and held.movable and (storage := held()) is not None:
            storage.resize_(0)
            held.state = AWAY
            self._storages.here_bytes -= held.room
            self._storages.inside(held)

    def fetch(self, held: Held) -> None:
        """Take memory for it and ask for a copy back."""
        if held.state != AWAY or held.copy is None or (storage := held()) is None:
            return
        with _DisableTorchDispatch(), torch.no_grad():
            storage.resize_(held.size)
            self._storages.here_bytes += held.room
            held.transfer = self._engine.back(held.copy, self._data(held))
        held.state = COMING
        self._moving[held.number] = held
        self._counts.in_bytes += held.size

    def settle(self, held: Held) -> None:
        """Wait for what moves it."""
        if held.transfer is not None:
            self._counts.waited(self._engine.wait(held.transfer))
            held.transfer, held.state = None, HERE
            self._moving.pop(held.number, None)

    def bring(self, held: Held) -> None:
        """Have it here."""
        if held.state == AWAY:
            self._counts.on_demand += 1
            self.fetch(held)
        if held.state == COMING:
            self.settle(held)

    def bring_each(self, absent: Iterable[Held]) -> None:
        """Have all of these here: their copies are on their way together."""
        absent = list(absent)
        for held in absent:
            if held.state == AWAY:
                self._counts.on_demand += 1
                self.fetch(held)
        for held in absent:
            if held.state == COMING:
                self.settle(held)

    def wrote(self, held: Held) -> None:
        """Its copy is old."""
        held.clean = False

    def settle_all(self) -> None:
        """Wait for all that is on its way: until then its copy keeps it alive, even if nobody else does."""
        for held in list(self._moving.values()):
            self.settle(held)

    def bring_all(self) -> None:
        """Have everything here."""
        self.settle_all()
        for held in list(self._storages.known.values()):
            self.bring(held)
