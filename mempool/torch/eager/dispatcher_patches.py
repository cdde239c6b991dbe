"""Patches of PyTorch functions that write storages past the dispatcher, or return addresses.

While offloading is installed, these functions are replaced in their classes. A replacement keeps a written
storage on the device while the function runs. A function that returns an address keeps the storage on the
device permanently, since the caller may use the address at any time. Functions that only read need no patch:
they find the bytes in the host copy (`interposer.park`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from mempool.recording.torch.ledger import storages_in
from mempool.torch.eager import interposer
from mempool.torch.eager.operator_traits import PLAIN
from mempool.torch.offload.hidden import hidden_from_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from mempool.torch.eager.storages import StorageRecord, StorageRegistry
    from mempool.torch.eager.transfers import TransferManager

#: Tensor methods that write the tensor while they run.
_TENSOR_WRITES = ("apply_", "map_", "map2_")
#: Storage methods that write the storage while they run.
_STORAGE_WRITES = ("copy_", "fill_", "resize_", "__setitem__", "_byteswap", "_set_from_file")
#: Storage methods that replace or share the storage's memory.
_STORAGE_KEEPS = (
    "_share_cuda_", "_share_fd_cpu_", "_share_filename_cpu_", "_swap_data_ptr_", "_resize_with_addr_",
)  # fmt: skip
#: Modules that ask for addresses only to compare them or to copy from them at once.
_PASSING = ("torch.nn.", "safetensors.", "transformers.", "accelerate.")
_NEW = object()


class DispatcherPatches:
    """Patches that keep storages on the device for code that bypasses the dispatcher, in any thread."""

    def __init__(
        self,
        storages: StorageRegistry,
        transfers: TransferManager,
        record_of: Callable[[torch.Tensor, Any], StorageRecord | None],
        known_record: Callable[[torch.Tensor, Any], StorageRecord | None],
        make_room_for: Callable[[StorageRecord], None],
    ) -> None:
        """Prepare the patches.

        Args:
            storages: registry of the known storages.
            transfers: reloads storages.
            record_of: returns the record of a tensor's storage; registers an unknown storage first.
            known_record: returns the record if an operation of the program used the storage, else None.
            make_room_for: evicts other storages before a storage is reloaded.
        """
        self._storages = storages
        self._transfers = transfers
        self._record_of, self._known_record = record_of, known_record
        self._make_room_for = make_room_for
        self._replaced: list[tuple[Any, str, Any]] = []
        self._held_for_iteration: deque[tuple[int, StorageRecord]] = (
            deque()
        )  # (iteration in which lent, storage)
        self._iteration = 0

    # --- lending

    def _find_records(self, values: Iterable[Any]) -> list[StorageRecord]:
        """Return the known storages among arguments: tensors, lists of tensors, storages."""
        pairs = (pair for value in _flatten(values) for pair in _storages_of(value))
        records = (self._known_record(plain, storage) for plain, storage in pairs)
        return [record for record in records if record is not None]

    @contextlib.contextmanager
    def lend(
        self, values: Iterable[Any], *, writes: bool = False
    ) -> Iterator[list[tuple[StorageRecord, bool]]]:
        """Reload the storages among the values; on exit, offload those again that had been offloaded."""
        lent: list[tuple[StorageRecord, bool]] = []
        try:
            for record in self._find_records(values):
                self._make_room_for(record)
                lent.append((record, False))
                lent[-1] = record, self._transfers.lend(record)
            yield lent
        finally:
            for record, away in lent:
                self._transfers.give_back(record, away=away, wrote=writes)

    def _records_of(self, value: Any) -> list[StorageRecord]:
        """Return the records of a tensor's storages, or of a storage; register unknown storages first."""
        found = (self._record_of(plain, storage) for plain, storage in _storages_of(value))
        return [record for record in found if record is not None]

    def hold_resident(self, value: Any) -> None:
        """Keep a tensor's storages, or a storage, on the device permanently."""
        for record in self._records_of(value):
            self._make_room_for(record)
            self._transfers.hold_resident(record)

    def _hold_for_iteration(self, value: Any) -> None:
        """Keep a tensor's storages, or a storage, on the device until the end of the next iteration."""
        for record in self._records_of(value):
            self._make_room_for(record)
            self._transfers.lend(record)
            self._held_for_iteration.append((self._iteration, record))

    def end_iteration(self) -> None:
        """End an iteration: unpin the storages lent before this iteration."""
        self._iteration += 1
        while self._held_for_iteration and self._held_for_iteration[0][0] + 2 <= self._iteration:
            _, record = self._held_for_iteration.popleft()
            self._transfers.give_back(record, away=False, wrote=True)

    # --- replaced functions

    def install(self) -> None:
        """Replace the functions."""
        tensor, storage = torch.Tensor, torch.UntypedStorage
        self._replace(tensor, ("__new__",), _wrap_constructor)
        self._replace(tensor, _TENSOR_WRITES, self._wrap_writer)
        self._replace(storage, _STORAGE_WRITES, self._wrap_writer)
        self._replace(storage, _STORAGE_KEEPS, self._wrap_export)
        self._replace(tensor, ("data_ptr", "const_data_ptr"), self._wrap_address_query)
        self._replace(storage, ("data_ptr",), self._wrap_address_query)
        self._replace(tensor, ("numpy", "__dlpack__"), self._wrap_export)
        self._replace(torch._C, ("_to_dlpack",), self._wrap_export)
        self._replace(torch.utils.dlpack, ("to_dlpack",), self._wrap_export)
        self._replace(storage, ("__getitem__",), self._wrap_entry_reader)
        self._replace(torch.TypedStorage, ("_getitem",), self._wrap_entry_reader)
        self._replace(storage, ("_write_file",), self._wrap_reader)  # these two let other threads run
        self._replace(torch._C.PyTorchFileWriter, ("write_record",), self._wrap_reader)
        if "__dlpack_c_exchange_api__" in vars(tensor):  # C functions; else __dlpack__ is called
            self._replaced.append((tensor, "__dlpack_c_exchange_api__", tensor.__dlpack_c_exchange_api__))
            del tensor.__dlpack_c_exchange_api__

    def _replace(self, owner: Any, names: Iterable[str], instead: Callable[[Any], Any]) -> None:
        """Replace the functions that this version of PyTorch has.

        PyTorch 2.11 lacks `const_data_ptr` and `_swap_data_ptr_`.
        """
        for name in names:
            if hasattr(owner, name):
                function = getattr(owner, name)
                self._replaced.append((owner, name, vars(owner).get(name, _NEW)))
                setattr(owner, name, instead(function))

    def remove(self) -> None:
        """Restore all replaced functions."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is _NEW:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def _wrap_reader(self, function: Any, *, writes: bool = False) -> Any:
        @functools.wraps(function)
        def lends(*args: Any, **kwargs: Any) -> Any:
            with self.lend((*args, *kwargs.values()), writes=writes):
                return function(*args, **kwargs)

        return lends

    def _wrap_writer(self, function: Any) -> Any:
        return self._wrap_reader(function, writes=True)

    def _wrap_export(self, function: Any) -> Any:
        @functools.wraps(function)
        def keeps(value: Any, *args: Any, **kwargs: Any) -> Any:
            self.hold_resident(value)
            for other in args:
                if isinstance(other, torch.UntypedStorage):
                    self.hold_resident(other)
            return function(value, *args, **kwargs)

        return keeps

    def _wrap_address_query(self, function: Any) -> Any:
        @functools.wraps(function)
        def address(value: Any) -> Any:
            caller = _calling_module()
            if caller.startswith(_PASSING):
                self._hold_for_iteration(value)
            elif caller != "torch.serialization":  # which only compares, to detect shared storages
                self.hold_resident(value)
            return function(value)

        return address

    def _wrap_entry_reader(self, function: Any) -> Any:
        @functools.wraps(function)
        def entry(storage: Any, key: Any) -> Any:
            if isinstance(key, slice):  # the slice is a storage of its own, in the same memory
                self.hold_resident(storage)
            elif getattr(storage, "_untyped_storage", storage).device.type == "cpu":
                # The bytes are at the address, wherever they lie.
                with hidden_from_program(), interposer.own_operations():
                    return function(storage, key)
            return function(storage, key)

        return entry


def _wrap_constructor(function: Any) -> Any:
    """Allow calls of tensor classes without ``__new__``.

    PyTorch creates no object of another class from a tensor that already is a Python object, as is every
    tensor that passed a mode.
    """

    @functools.wraps(function)
    def construct(cls: Any, *args: Any, **kwargs: Any) -> Any:
        dispatches = any(isinstance(one, torch.Tensor) and type(one) not in PLAIN for one in args)
        if cls is torch.Tensor or dispatches or _len_torch_dispatch_stack() != 1:
            return function(cls, *args, **kwargs)
        with torch._C._DisableTorchDispatch():
            return function(cls, *args, **kwargs)

    return staticmethod(construct)


def _flatten(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the arguments and the items of lists; lists of numbers, possibly long, are skipped."""
    for value in values:
        if isinstance(value, (list, tuple)):
            if value and isinstance(value[0], (torch.Tensor, list, tuple)):
                yield from _flatten(value)
        else:
            yield value


def _storages_of(value: Any) -> Sequence[tuple[torch.Tensor, Any]]:
    """Return the storages of a tensor, or a storage, each with a tensor on the same device."""
    value = getattr(value, "_untyped_storage", value)
    if isinstance(value, torch.UntypedStorage):
        with interposer.own_operations(), hidden_from_program():
            return [(torch.empty(0, dtype=torch.uint8, device=value.device), value)]
    if isinstance(value, torch.Tensor):
        with contextlib.suppress(NotImplementedError, RuntimeError):  # no storage
            return storages_in(_unwrap(value))
    return ()


def _unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor under the transforms of ``torch.func``."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _calling_module() -> str:
    """Return the name of the module that asked for an address."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if (name := str(frame.f_globals.get("__name__"))) not in ("torch.storage", "torch._tensor"):
            return name
        frame = frame.f_back
    return ""
