"""Offloads and reloads of single storages, each safe at any moment."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import torch
from torch._C import _DisableFuncTorch, _DisableTorchDispatch

from mempool.torch.eager.storages import (
    AWAY,
    COMING,
    HERE,
    LEAVING,
    Held,
    Storages,
    address_of,
    bytes_of,
    is_resizable,
    resize,
)
from mempool.torch.offload.engine import HostFullError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mempool.torch.eager.report import SwapCounts
    from mempool.torch.offload.engine import Engine, Transfer

#: Smallest storage that moves, bytes: C++ wraps numbers in small tensors of its own, and keeps their
#: addresses from one operation to the next.
_LEAST_BYTES = 1024


@contextlib.contextmanager
def between_us() -> Iterator[None]:
    """Run operations of ours that no mode, transform or mark of the program may see or change.

    All these guards end with their objects, even if Ctrl-C comes at the exit. `torch.no_grad` would not, and
    bytes need no gradient guard.
    """
    transforms = _DisableFuncTorch()
    with (
        torch._C.DisableTorchFunction(),
        _DisableTorchDispatch(),
        torch.inference_mode(mode=False),
    ):
        yield
    del transforms


class Mover:
    """Offloads and reloads storages, one at a time, and keeps the states in `storages` true.

    Ctrl-C may interrupt a move anywhere, and several threads may request moves at once. So the order of the
    lines matters: once the copy is good, an interrupted record errs towards AWAY; before, towards HERE.

    Attributes:
        lock: held while something moves.
        thread: the thread whose operations are planned, and which may use storages on the device without
            lending.
        least_bytes: smaller storages do not move.
        stays: whether all storages stay on the device, since unseen operations may use them.
        arrived: (row of the plan, transfer) of each finished reload, until the reader clears the list.
    """

    def __init__(self, engine: Engine, storages: Storages, counts: SwapCounts) -> None:
        self._engine = engine
        self._storages = storages
        self._counts = counts
        self._moving: dict[int, Held] = {}
        self.arrived: list[tuple[int, Transfer]] = []
        self.lock = threading.RLock()
        self.thread = threading.get_ident()
        self.least_bytes = _LEAST_BYTES
        self.stays = False

    def _data(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def leave(self, held: Held, at: int = -1) -> None:
        """Start an offload to the planned place `at` on the host, or to any place for -1."""
        with self.lock:
            if held.state != HERE or held.clean or not self._may_leave(held):
                return
            with between_us():
                self._drop(held)
                try:
                    held.copy, held.transfer = self._engine.offload(self._data(held()), at)
                except HostFullError:
                    self._counts.host_full += 1
                    return
            self._moving[held.number] = held
            held.state, held.clean = LEAVING, True
            self._counts.out_bytes += held.size

    def forget(self, held: Held) -> None:
        """Free the host copy of a storage: while all goes by plan, nothing reads that copy again."""
        with self.lock:
            if held.state == HERE and held.copy is not None:
                held.clean = False
                self._drop(held)

    def _may_leave(self, held: Held) -> bool:
        """Return whether a storage may be offloaded: movable, unpinned and large enough.

        A size that the program changed is updated first.
        """
        if self.stays or not held.movable or held.pins or (storage := held()) is None:
            return False
        if bytes_of(storage) != held.size:
            self._storages.resized(held, bytes_of(storage))
        if held.size < self.least_bytes:
            return False
        held.movable = is_resizable(storage) and address_of(storage) != 0
        return held.movable

    def _drop(self, held: Held) -> None:
        if held.copy is not None:
            copy, held.copy = held.copy, None
            self._engine.drop(copy)

    def release(self, held: Held) -> None:
        """Free the device memory of a storage, once the offload has ended."""
        with self.lock:
            self.settle(held)
            if held.state != HERE or not self._may_leave(held) or not held.clean:
                return
            held.state = AWAY
            self._storages.here_bytes -= held.room
            self._storages.inside(held)
            self._engine.fence()
            resize(held(), 0)

    def fetch(self, held: Held) -> None:
        """Allocate device memory for a storage and start the reload."""
        with self.lock:
            if held.state != AWAY or held.copy is None or (storage := held()) is None:
                return
            with between_us():
                resize(storage, held.size)
                held.transfer = self._engine.reload(held.copy, self._data(storage))
            self._moving[held.number] = held
            held.state = COMING
            self._storages.here_bytes += held.room
            self._counts.in_bytes += held.size

    def settle(self, held: Held) -> None:
        """Wait for the transfer of a storage."""
        with self.lock:
            if (transfer := held.transfer) is None:
                return
            try:
                self._counts.waited(self._engine.wait(transfer))
            except Exception:  # the copy failed
                leaving = held.state != COMING
                held.state, held.transfer, held.clean = HERE if leaving else AWAY, None, not leaving
                self._moving.pop(held.number, None)
                if not leaving:
                    self._storages.here_bytes -= held.room
                    if (storage := held()) is not None:
                        resize(storage, 0)
                    raise
            if held.state == COMING and held.row >= 0:
                self.arrived.append((held.row, transfer))
            if held.state in (LEAVING, COMING):
                held.state = HERE
            held.transfer = None
            self._moving.pop(held.number, None)

    def bring(self, held: Held) -> None:
        """Reload a storage and wait for the reload."""
        with self.lock:
            if held.state == AWAY:
                self._counts.on_demand += 1
                self.fetch(held)
            if held.state == COMING:
                self.settle(held)

    def bring_each(self, absent: Iterable[Held]) -> None:
        """Reload several storages; all reloads start before the first is waited for."""
        absent = list(absent)
        with self.lock:
            for held in absent:
                if held.state == AWAY:
                    self._counts.on_demand += 1
                    self.fetch(held)
            for held in absent:
                if held.state == COMING:
                    self.settle(held)

    def wrote(self, held: Held) -> None:
        """Mark the host copy of a storage as stale."""
        held.clean = False

    def lend(self, held: Held) -> bool:
        """Reload and pin a storage until `returned`; return whether the storage was offloaded."""
        with self.lock:
            away = held.state == AWAY
            held.pins += 1
            try:
                self.bring(held)
            except BaseException:
                held.pins -= 1
                raise
            return away

    def returned(self, held: Held, *, away: bool, wrote: bool) -> None:
        """Unpin a lent storage; if offloaded before and still unmodified, offload the storage again."""
        with self.lock:
            if wrote:
                held.clean = False
            held.pins -= 1
            if away and threading.get_ident() == self.thread:  # else an operation may be using the storage
                self.release(held)

    def keep(self, held: Held) -> None:
        """Reload a storage and keep the storage for good: other code knows the address."""
        with self.lock:
            held.movable = False
            self.bring(held)

    def settle_all(self) -> None:
        """Wait for all transfers under way: until then, a transfer keeps a storage alive that nobody uses."""
        for held in list(self._moving.values()):
            self.settle(held)

    def bring_all(self) -> None:
        """Reload every storage."""
        self.settle_all()
        for held in list(self._storages.known.values()):
            self.bring(held)
