"""Moves of storages between the device and the host, each safe at any moment."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import torch
from torch._C import _DisableFuncTorch, _DisableTorchDispatch

from mempool.torch.swapping.engine import HostFullError
from mempool.torch.swapping.storages import (
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

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mempool.torch.swapping.engine import Engine, Transfer
    from mempool.torch.swapping.report import SwapCounts

#: Numbers that C++ wraps in tensors for itself, and keeps the addresses of from one operation to the next.
_LEAST_BYTES = 1024


@contextlib.contextmanager
def between_us() -> Iterator[None]:
    """Operations of ours, that no mode, transform or mark of the program's may see or change.

    All of these end with their objects, too, if Ctrl-C comes when they should be left. `torch.no_grad` would
    not, and bytes need none.
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
    """Moves storages, one at a time, and keeps what `storages` says of them true.

    A move may be broken off anywhere by Ctrl-C, and threads may ask for one at once. So the order of the
    lines matters: what is written down errs on the side of AWAY once the copy is good, and of HERE before.

    Attributes:
        lock: held while something moves.
        thread: whose operations are planned, and may use what is here without its being lent.
        least_bytes: what is smaller does not move.
        stays: whether nothing leaves, since operations are not seen that may use it.
        arrived: rows of the plan that came back, with their copies, until somebody clears it.
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
        """Ask for a copy to the host, to where it is planned to lie, or at -1 to any place."""
        with self.lock:
            if held.state != HERE or held.clean or not self._may_leave(held):
                return
            with between_us():
                self._drop(held)
                try:
                    held.copy, held.transfer = self._engine.out(self._data(held()), at)
                except HostFullError:
                    self._counts.host_full += 1
                    return
            self._moving[held.number] = held
            held.state, held.clean = LEAVING, True
            self._counts.out_bytes += held.size

    def forget(self, held: Held) -> None:
        """Give the host's memory of its copy back: where all goes by plan, nothing reads it again."""
        with self.lock:
            if held.state == HERE and held.copy is not None:
                held.clean = False
                self._drop(held)

    def _may_leave(self, held: Held) -> bool:
        """Whether nobody but operations uses it, and it is as large as when it was met."""
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
        """Give its memory back, once its copy is there."""
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
        """Take memory for it and ask for a copy back."""
        with self.lock:
            if held.state != AWAY or held.copy is None or (storage := held()) is None:
                return
            with between_us():
                resize(storage, held.size)
                held.transfer = self._engine.back(held.copy, self._data(storage))
            self._moving[held.number] = held
            held.state = COMING
            self._storages.here_bytes += held.room
            self._counts.in_bytes += held.size

    def settle(self, held: Held) -> None:
        """Wait for what moves it."""
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
        """Have it here."""
        with self.lock:
            if held.state == AWAY:
                self._counts.on_demand += 1
                self.fetch(held)
            if held.state == COMING:
                self.settle(held)

    def bring_each(self, absent: Iterable[Held]) -> None:
        """Have all of these here: their copies are on their way together."""
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
        """Its copy is old."""
        held.clean = False

    def lend(self, held: Held) -> bool:
        """Have it here, and keep it here until `returned`. Returns whether it was away."""
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
        """It was lent, and may move again; what was away and is as it was is away again."""
        with self.lock:
            if wrote:
                held.clean = False
            held.pins -= 1
            if away and threading.get_ident() == self.thread:  # else an operation there may use it by now
                self.release(held)

    def keep(self, held: Held) -> None:
        """Have it here for good: somebody knows its address."""
        with self.lock:
            held.movable = False
            self.bring(held)

    def settle_all(self) -> None:
        """Wait for all that is on its way: until then its copy keeps it alive, even if nobody else does."""
        for held in list(self._moving.values()):
            self.settle(held)

    def bring_all(self) -> None:
        """Have everything here."""
        self.settle_all()
        for held in list(self._storages.known.values()):
            self.bring(held)
