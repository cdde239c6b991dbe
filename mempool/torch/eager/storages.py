"""Registry of the known storages, by identity: location, copies and last use of each."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mempool.torch.offload.engine import HostCopy, Transfer

#: Location of a storage's bytes. LEAVING: on the device, with an offload under way. COMING: device memory is
#: allocated again, with a reload under way. GONE: the storage has ended.
HERE, LEAVING, AWAY, COMING, GONE = range(5)
storage_of = torch._C.TensorBase.untyped_storage
#: The storages' own functions, unaffected by the patches of `escapes`.
bytes_of = torch._C.StorageBase.nbytes
is_resizable = torch._C.StorageBase.resizable
resize = torch._C.StorageBase.resize_
_GENERATOR_BYTES = torch.default_generator.get_state().nbytes


def address_of(storage: Any) -> int:
    """Return the address of a storage's memory; 0 if none, as for zero tensors that were never written."""
    try:
        return int(torch._C.StorageBase.data_ptr(storage))
    except RuntimeError:
        return 0


class Held(weakref.ref[Any]):
    """Record of a living, swappable storage on the device.

    Attributes:
        outside: whether the memory is not the pool's.
        key: ``id`` of the storage; another storage may have the same after this one ends.
        number: serial number, in the order in which storages were met.
        size: bytes of the storage when on the device.
        room: bytes of device memory, the size rounded up.
        state: HERE, LEAVING, AWAY, COMING or GONE.
        movable: whether the memory may be freed and allocated again.
        pins: number of present users past the dispatcher; a pinned storage does not move.
        born: (operation, place among the operation's results) in this iteration, with places -1, -2, ... for
            storages met as arguments; None for a storage of earlier iterations.
        row: row in the program, -1 for none.
        last: number of the last operation that used the storage, counted over all iterations.
        copy: copy on the host, possibly stale; None without a copy.
        clean: whether nothing wrote to the storage since the copy was started.
        transfer: the transfer under way while LEAVING or COMING.
    """

    __slots__ = (
        "born", "clean", "copy", "key", "last", "movable", "number", "outside", "pins", "room", "row",
        "size", "state", "transfer",
    )  # fmt: skip

    born: tuple[int, int] | None
    clean: bool
    copy: HostCopy | None
    key: int
    last: int
    movable: bool
    number: int
    outside: bool
    pins: int
    room: int
    row: int
    size: int
    state: int
    transfer: Transfer | None


def _is_generators(tensor: torch.Tensor, size: int) -> bool:
    """Return whether the tensor may be a random generator's state, which an unpatchable C++ class reads."""
    return size == _GENERATOR_BYTES and tensor.dtype is torch.uint8 and tensor.is_cpu


class Storages:
    """Registry of the storages that were met and are alive.

    Attributes:
        device: kind of the device, such as ``cpu``.
        known: records by ``id`` of the storage. Dead records stay until `buried`, so a lookup must compare
            the storage itself (`find`).
        here_bytes: device memory of all storages that are not AWAY, dead ones included until `buried`.
        outside_bytes: the part of `here_bytes` that is not the pool's.
        dead: records of storages that ended and are not yet buried. Python drops a Ctrl-C raised in a weak
            reference's callback, so the callback does no more than this single append, in C.
    """

    def __init__(
        self, device: torch.device, alignment: int, owns: Callable[[int], bool] | None = None
    ) -> None:
        self._owns = owns
        self.device = device.type
        self._is_ours = operator.attrgetter(f"is_{device.type}")
        self.alignment = alignment
        self._numbers = 0
        self.dead: deque[Held] = deque()
        self.known: dict[int, Held] = {}
        self.here_bytes = self.outside_bytes = 0

    def meet(self, tensor: torch.Tensor, storage: Any, born: tuple[int, int] | None, now: int) -> Held | None:
        """Register a storage seen for the first time; None if empty or on another device."""
        size = bytes_of(storage)
        if size == 0 or not self._is_ours(tensor):
            return None
        held = Held(storage, self.dead.append)
        held.key, held.number, held.size = id(storage), self._numbers, size
        held.room = self._room(size)
        held.state, held.movable = HERE, is_resizable(storage) and not _is_generators(tensor, size)
        held.born, held.row, held.last, held.pins = born, -1, now, 0
        held.copy = held.transfer = None
        held.clean = False
        known = self.known.setdefault(held.key, held)
        if known is not held:
            if known() is storage:  # registered by another thread
                return known
            self.known[held.key] = held
        self._numbers += 1
        self.here_bytes += held.room
        # Storages made by operations are the pool's; other storages may be older than the pool, or foreign.
        held.outside = born is None and self._owns is not None and not self._owns(address_of(storage))
        self.outside_bytes += held.room if held.outside else 0
        return held

    def resized(self, held: Held, size: int) -> None:
        """Update the size of a storage on the device after the program resized the storage."""
        self.inside(held)
        room = self._room(size)
        self.here_bytes += room - held.room
        held.size, held.room, held.clean = size, room, False

    def _room(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def inside(self, held: Held) -> None:
        """Count a storage as the pool's from now on: the next memory of the storage will be."""
        if held.outside:
            held.outside = False
            self.outside_bytes -= held.room

    def buried(self) -> Iterator[Held]:
        """Yield the storages that ended since the last call; after a Ctrl-C, the interrupted one again."""
        dead = self.dead
        while dead:
            held = dead[0]
            if self.known.get(held.key) is held:
                del self.known[held.key]
            if held.state != GONE:
                here = held.room if held.state != AWAY else 0
                outside = held.room if held.outside else 0
                # one line: Ctrl-C comes between lines
                held.state, self.here_bytes, self.outside_bytes = (
                    GONE, self.here_bytes - here, self.outside_bytes - outside
                )  # fmt: skip
            yield held
            dead.popleft()

    def find(self, storage: Any) -> Held | None:
        """Return the record of a storage, or None."""
        held = self.known.get(id(storage))
        return held if held is not None and held() is storage else None

    def of(self, tensor: torch.Tensor) -> Held | None:
        """Return the record of a tensor's storage, or None."""
        return self.find(storage_of(tensor))
