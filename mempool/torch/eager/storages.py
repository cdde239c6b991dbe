"""Registry of the known storages, by identity: location, copies and last use of each."""

from __future__ import annotations

import contextlib
import gc
import operator
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from mempool.torch.eager.operator_traits import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mempool.torch.offload.engine import HostCopy, Transfer

#: Location of a storage's bytes. OFFLOADING: on the device, with an offload under way. OFFLOADED: on the host
#: only, in the copy. RELOADING: still in the copy, with a reload into new device memory under way. ENDED: the
#: storage has ended.
RESIDENT, OFFLOADING, OFFLOADED, RELOADING, ENDED = range(5)
storage_of = torch._C.TensorBase.untyped_storage
#: The storages' own functions, unaffected by the patches of `dispatcher_patches`.
bytes_of = torch._C.StorageBase.nbytes
is_resizable = torch._C.StorageBase.resizable
_GENERATOR_BYTES = torch.default_generator.get_state().nbytes


def address_of(storage: Any) -> int:
    """Return the address of a storage's memory; 0 if none, as for zero tensors that were never written."""
    try:
        return int(torch._C.StorageBase.data_ptr(storage))
    except RuntimeError:
        return 0


class StorageRecord(weakref.ref[Any]):
    """Record of a living, swappable storage on the device.

    Attributes:
        is_foreign: whether the memory is not the pool's.
        key: ``id`` of the storage, which Python may reuse after the storage ends.
        number: serial number, in the order of registration.
        size: bytes of the storage when on the device.
        rounded_bytes: bytes of device memory, the size rounded up.
        stream: the stream that the memory was allocated on; None on a device without streams.
        state: RESIDENT, OFFLOADING, OFFLOADED, RELOADING or ENDED.
        movable: whether the memory may be freed and allocated again.
        pins: number of present users outside the dispatcher; a pinned storage does not move.
        birth: (operation, index among the operation's results) in this iteration, with indices -1, -2, ...
            for storages first seen as arguments; None for a storage of earlier iterations.
        row: row in the schedule's step; -1 for none.
        last: number of the last operation that used the storage, counted over all iterations.
        copy: copy on the host, possibly stale; None without a copy.
        has_valid_copy: whether the storage is unmodified since the copy was started.
        transfer: the transfer under way while OFFLOADING or RELOADING.
        landing: a storage of new device memory that a reload under way fills; else None.
        writes: value of `interposer.copy_writes` when the last reload began.
    """

    __slots__ = (
        "birth", "copy", "has_valid_copy", "is_foreign", "key", "landing", "last", "movable", "number",
        "pins", "rounded_bytes", "row", "size", "state", "stream", "transfer", "writes",
    )  # fmt: skip

    birth: tuple[int, int] | None
    has_valid_copy: bool
    copy: HostCopy | None
    key: int
    landing: Any
    last: int
    movable: bool
    number: int
    is_foreign: bool
    pins: int
    rounded_bytes: int
    row: int
    size: int
    state: int
    stream: Any
    transfer: Transfer | None
    writes: int


def _is_generators(tensor: torch.Tensor, size: int) -> bool:
    """Return whether the tensor may be a random generator's state: a C++ class reads it, without a patch."""
    return size == _GENERATOR_BYTES and tensor.dtype is torch.uint8 and tensor.is_cpu


class StorageRegistry:
    """Registry of the living storages seen so far.

    Attributes:
        device: kind of the device, such as ``cpu``.
        records: records by ``id`` of the storage. Records of dead storages remain until `take_dead`, so a
            lookup must compare the storage itself (`find`).
        resident_bytes: device memory of all storages that are not OFFLOADED, dead ones included until
            `take_dead`.
        foreign_bytes: the part of `resident_bytes` that is not the pool's.
        dead: records of ended storages that `take_dead` has not yet yielded. Python drops a Ctrl-C raised in
            a weak reference's callback, so the callback is a single append in C.
    """

    def __init__(
        self,
        device: torch.device,
        alignment: int,
        owns: Callable[[int], bool] | None = None,
        current_stream: Callable[[], Any] = lambda: None,
    ) -> None:
        self._owns, self._current_stream = owns, current_stream
        self.device = device.type
        self._is_on_device = operator.attrgetter(f"is_{device.type}")
        self.alignment = alignment
        self._numbers = 0
        self.dead: deque[StorageRecord] = deque()
        self.records: dict[int, StorageRecord] = {}
        self.resident_bytes = self.foreign_bytes = 0

    def register(
        self, tensor: torch.Tensor, storage: Any, birth: tuple[int, int] | None, now: int
    ) -> StorageRecord | None:
        """Register a storage seen for the first time; None if empty or on another device."""
        size = bytes_of(storage)
        if size == 0 or not self._is_on_device(tensor):
            return None
        record = StorageRecord(storage, self.dead.append)
        record.key, record.number, record.size = id(storage), self._numbers, size
        record.rounded_bytes = self._rounded(size)
        record.state, record.movable = RESIDENT, is_resizable(storage) and not _is_generators(tensor, size)
        record.birth, record.row, record.last, record.pins = birth, -1, now, 0
        record.copy = record.transfer = record.landing = None
        record.stream = self._current_stream()
        record.has_valid_copy = False
        # Storages made by operations are the pool's; other storages may predate the pool, or be foreign.
        record.is_foreign = birth is None and self._owns is not None and not self._owns(address_of(storage))
        outside = record.rounded_bytes if record.is_foreign else 0
        known = self.records.get(record.key)
        if known is not None and known() is storage:  # registered by another thread
            return known
        # No calls from here on: neither Ctrl-C nor another thread can interrupt.
        self.records[record.key] = record
        self._numbers += 1
        self.resident_bytes += record.rounded_bytes
        self.foreign_bytes += outside
        return record

    def next_number(self) -> int:
        """Return a serial number for a storage that ended before its registration."""
        self._numbers += 1
        return self._numbers - 1

    def set_resident(self, record: StorageRecord, state: int) -> None:
        """Set the state of a storage, and count its device memory accordingly."""
        more = (record.state == OFFLOADED) - (state == OFFLOADED)
        # one line: Ctrl-C comes between lines
        record.state, self.resident_bytes = state, self.resident_bytes + more * record.rounded_bytes

    def python_tensors(self) -> list[torch.Tensor]:
        """Return the tensors on the device that Python knows."""
        return [one for one in gc.get_objects() if type(one) in PLAIN and self._is_on_device(one)]

    def pin_aliases(self) -> None:
        """Keep storages resident that share memory with another one, such as those of `torch.from_dlpack`.

        Only tensors that Python knows are considered; later aliases are found at their creation.
        """
        storages: dict[int, tuple[int, torch.Tensor, Any]] = {}
        for tensor in self.python_tensors():
            with contextlib.suppress(NotImplementedError, RuntimeError):  # no storage
                storage = storage_of(tensor)
                storages[id(storage)] = address_of(storage), tensor, storage
        end, last = 0, None
        for address, tensor, storage in sorted(storages.values(), key=operator.itemgetter(0)):
            if address and address < end:
                for one in (last, (tensor, storage)):
                    if one is not None and (record := self.register(*one, None, 0)) is not None:
                        record.movable = False
            if address and address + bytes_of(storage) > end:
                end, last = address + bytes_of(storage), (tensor, storage)

    def resize_record(self, record: StorageRecord, size: int) -> None:
        """Update the size of a storage on the device after the program resized the storage."""
        self.mark_owned(record)
        room = self._rounded(size)
        self.resident_bytes += room - record.rounded_bytes
        record.size, record.rounded_bytes, record.has_valid_copy = size, room, False

    def _rounded(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def mark_owned(self, record: StorageRecord) -> None:
        """Count a storage as the pool's from now on, since its next device memory is the pool's."""
        if record.is_foreign:
            record.is_foreign = False
            self.foreign_bytes -= record.rounded_bytes

    def take_dead(self) -> Iterator[StorageRecord]:
        """Yield the storages that ended since the last call.

        After a Ctrl-C, yield the interrupted one again.
        """
        dead = self.dead
        while dead:
            record = dead[0]
            if self.records.get(record.key) is record:
                del self.records[record.key]
            if record.state != ENDED:
                here = record.rounded_bytes if record.state != OFFLOADED else 0
                outside = record.rounded_bytes if record.is_foreign else 0
                # one line: Ctrl-C comes between lines
                record.state, self.resident_bytes, self.foreign_bytes = (
                    ENDED, self.resident_bytes - here, self.foreign_bytes - outside
                )  # fmt: skip
            yield record
            dead.popleft()

    def find(self, storage: Any) -> StorageRecord | None:
        """Return the record of a storage, or None."""
        record = self.records.get(id(storage))
        return record if record is not None and record() is storage else None

    def of(self, tensor: torch.Tensor) -> StorageRecord | None:
        """Return the record of a tensor's storage, or None."""
        return self.find(storage_of(tensor))
