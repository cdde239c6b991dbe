"""Swapping with random moves at every operation, and with copies made as late as allowed."""

from __future__ import annotations

import contextlib
import ctypes
import random
from typing import Any

import torch

from mempool import _core
from mempool.torch.eager.mode import OffloadMode
from mempool.torch.eager.storages import OFFLOADED, RELOADING
from solvers.swap import Link

CPU = torch.device("cpu")
ADDRESS = torch._C.StorageBase.data_ptr


def resident_bytes(mode: OffloadMode, tensor: Any) -> int:
    """Return the bytes that a tensor's storage, or a storage, has on the device."""
    storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else tensor
    record = mode.storages.find(storage)
    return 0 if record is not None and record.state in (OFFLOADED, RELOADING) else storage.nbytes()


class Copy:
    """A copy on the host."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.data = ctypes.create_string_buffer(bytes([0xA5]) * size, size)
        self.users = 0
        self.dropped = False

    def end(self) -> None:
        """Overwrite the bytes of a copy that is dropped and has no users."""
        if self.dropped and not self.users:
            ctypes.memset(self.data, 0x5A, self.size)


class Transfer:
    """A requested copy, which may not be made yet."""

    def __init__(self, copy: Copy, data: Any, *, out: bool) -> None:
        self.size, self.copy, self.data, self.out = copy.size, copy, data, out
        self.made = False


class LazyEngine:
    """An engine that makes copies at random moments until they are awaited, and fills absent bytes."""

    streams = True

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._asked: tuple[list[Transfer], list[Transfer]] = [], []

    def _ask(self, transfer: Transfer) -> Transfer:
        transfer.copy.users += 1
        assert not transfer.copy.dropped
        assert transfer.data.nbytes() == transfer.size
        self._asked[transfer.out].append(transfer)
        for waiting in self._asked:  # make some copies now
            if waiting and self._random.random() < 0.3:
                self._make(waiting[self._random.randrange(len(waiting))])
        return transfer

    def _make(self, last: Transfer) -> None:
        waiting = self._asked[last.out]
        while waiting and not last.made:
            transfer = waiting.pop(0)
            ends = (ctypes.addressof(transfer.copy.data), ADDRESS(transfer.data))
            target, source = ends if transfer.out else ends[::-1]
            ctypes.memmove(target, source, transfer.size)
            transfer.made = True

    def bytes_of(self, storage: Any) -> Any:
        return storage

    def address(self, copy: Copy) -> int:
        return ctypes.addressof(copy.data)

    def offload(self, data: Any, at: int = -1) -> tuple[Copy, Transfer]:
        copy = Copy(data.nbytes())
        return copy, self._ask(Transfer(copy, data, out=True))

    def reload(self, copy: Any, data: Any) -> Transfer:
        ctypes.memset(ADDRESS(data), 0xCC, data.nbytes())
        return self._ask(Transfer(copy, data, out=False))

    def wait(self, transfer: Any) -> float:
        self._make(transfer)
        if transfer.data is not None:
            transfer.data = None
            transfer.copy.users -= 1
            transfer.copy.end()
            transfer.copy = None
        return 0.0

    def drop(self, copy: Any) -> None:
        copy.dropped = True
        copy.end()

    def mark(self, prepare: Any = None) -> float:
        return 0.0

    def seconds(self, marks: list[Any]) -> list[float]:
        return [1e-3] * (len(marks) - 1)

    def link(self) -> Link:
        return Link.of_rate(1e9)

    def take_waits(self) -> list[float]:
        return []

    def waited(self, transfer: Any) -> float:
        return 0.0

    def fence(self) -> None:
        """Do nothing: no stream runs in parallel with the program."""

    def note_stream(self) -> None:
        """Do nothing: there is one stream and no graph."""

    current_stream = check_reload = begin_capture = end_capture = is_capturing = note_stream

    def on(self, _: None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reserve(self, size: int) -> None:
        """Do nothing: no allocation takes long."""

    def end_iteration(self) -> None:
        """Do nothing: there is no memory to return."""

    @property
    def host_bytes(self) -> int:
        return 0

    def close(self) -> None:
        for waiting in self._asked:
            waiting.clear()


class Adversary(OffloadMode):
    """Make random moves before every operation and in `disturb`, as far as allowed.

    After an operation it only lets copies begin, as a plan does: C++ may still use what it had made.
    """

    def __init__(
        self,
        seed: int,
        *,
        limit_bytes: int = 1 << 40,
        share: float = 0.5,
        least: int = 1,
        client: _core.Client | None = None,
    ) -> None:
        super().__init__(LazyEngine(seed), CPU, limit_bytes, client=client)
        self._random = random.Random(~seed)
        self.share = share
        self.transfers.min_bytes = least
        self.offloaded_count = 0  #: number of offloaded storages

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self.engine.close()
        for record in self.storages.records.values():
            record.copy = None  # copies are in the pool's memory here

    def offload_all(self) -> None:
        """Offload all storages that may be offloaded."""
        for record in list(self.storages.records.values()):
            self.transfers.offload(record)
            self.transfers.release(record)

    def disturb(self) -> None:
        """Make random moves of the known storages."""
        transfers, choose = self.transfers, self._random
        for record in list(self.storages.records.values()):
            if choose.random() < self.share:
                moves = (
                    transfers.offload,
                    transfers.release,
                    transfers.reload,
                    transfers.wait,
                    transfers.drop_copy,
                )
                for move in choose.choices(moves, (4, 6, 1, 1, 1), k=choose.randint(1, 3)):
                    move(record)
                self.offloaded_count += record.state == 2

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.disturb()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for record in list(self.storages.records.values()):
            if self._random.random() < self.share:
                self.transfers.offload(record)
        return result


def offloaded_range(mode: Adversary) -> torch.Tensor:
    """Return the numbers from 1 to 1000 in an offloaded tensor."""
    tensor = torch.arange(1000.0).add_(1)
    mode.offload_all()
    assert resident_bytes(mode, tensor) == 0
    return tensor
