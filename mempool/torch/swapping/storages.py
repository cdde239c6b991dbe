"""The storages that swapping knows, by identity: where each is, and what it was last used for."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mempool.torch.swapping.engine import HostCopy, Transfer

#: Where a storage's bytes are. LEAVING: on the device, and being copied to the host. COMING: it has memory on
#: the device again, which is being filled. GONE: the storage has ended.
HERE, LEAVING, AWAY, COMING, GONE = range(5)
storage_of = torch._C.TensorBase.untyped_storage
#: Of a storage itself, whatever the methods of its class may be while swapping (`escapes`).
bytes_of = torch._C.StorageBase.nbytes
is_resizable = torch._C.StorageBase.resizable
resize = torch._C.StorageBase.resize_
_GENERATOR_BYTES = torch.default_generator.get_state().nbytes


def address_of(storage: Any) -> int:
    """Where a storage's memory is; 0 for none, such as that of a tensor of zeros that were never written."""
    try:
        return int(torch._C.StorageBase.data_ptr(storage))
    except RuntimeError:
        return 0


class Held(weakref.ref[Any]):
    """A living storage on the device that is swapped.

    Attributes:
        outside: whether its memory is not the pool's.
        key: its ``id``, which another may have when this one is gone.
        number: which one it is, in the order in which they were met.
        size: bytes of it when it is here.
        room: bytes that it takes of the device's memory, the size rounded up.
        state: HERE, LEAVING, AWAY, COMING or GONE.
        movable: whether its memory may be given back and had again.
        pins: how many are using its memory past the dispatcher now: it does not move then.
        born: the operation of the iteration that made it and its place among what that made; None: an
            iteration before did.
        row: its row in the program, -1 for none.
        last: number of the last operation that touched it, counted over all iterations.
        copy: its bytes on the host, which may be old; None: there are none.
        clean: whether nothing wrote since that copy was asked for.
        transfer: what fills or copies it, while LEAVING or COMING.
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
    """Whether it may be a random generator's state: C++ reads it, in a class that cannot be changed."""
    return size == _GENERATOR_BYTES and tensor.dtype is torch.uint8 and tensor.is_cpu


class Storages:
    """Those that were met and are alive.

    Attributes:
        device: kind of the device, such as ``cpu``.
        known: by ``id`` of the storage; also of the dead until `buried`, so that who looks must ask for the
            storage itself (`find`).
        here_bytes: what those that are not AWAY take of the device's memory; of the dead until `buried`.
        outside_bytes: of these, what is not the pool's.
        dead: what ended and is not buried. Python drops Ctrl-C that comes while a weak reference tells that
            its object has ended, so all that happens then is this one append, in C.
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
        """A storage that is seen for the first time; None where it is not of this device, or empty."""
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
            if known() is storage:  # another thread met it
                return known
            self.known[held.key] = held
        self._numbers += 1
        self.here_bytes += held.room
        # What an operation makes is the pool's; what is met may be older than that, or of others.
        held.outside = born is None and self._owns is not None and not self._owns(address_of(storage))
        self.outside_bytes += held.room if held.outside else 0
        return held

    def resized(self, held: Held, size: int) -> None:
        """The program gave a storage that is here another size."""
        self.inside(held)
        room = self._room(size)
        self.here_bytes += room - held.room
        held.size, held.room, held.clean = size, room, False

    def _room(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def inside(self, held: Held) -> None:
        """The memory that a storage had is no longer its own; what it gets instead is the pool's."""
        if held.outside:
            held.outside = False
            self.outside_bytes -= held.room

    def buried(self) -> Iterator[Held]:
        """Those that ended since the last call; each again if Ctrl-C came before the next was asked for."""
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
        """What is known of a storage."""
        held = self.known.get(id(storage))
        return held if held is not None and held() is storage else None

    def of(self, tensor: torch.Tensor) -> Held | None:
        """What is known of a tensor's storage."""
        return self.find(storage_of(tensor))
