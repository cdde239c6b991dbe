"""Patches of PyTorch functions that read or write storages past the dispatcher, even offloaded ones.

While swapping is installed, these functions are replaced in their classes: the storages that they use are on
the device as long as they run. A function that hands out an address, for an unknown time, keeps the storage
on the device for good.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _DisableTorchDispatch

from mempool.recording.torch.ledger import storages_in
from mempool.torch.eager.storages import AWAY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from mempool.torch.eager.storages import Held, Storages
    from mempool.torch.eager.transfers import Mover

#: Tensor methods that read the tensor while they run, and methods that also write.
_TENSOR_READS = ("tolist", "item", "__float__", "__int__", "__bool__", "__index__", "__complex__")
_TENSOR_WRITES = ("apply_", "map_", "map2_")
#: Storage methods that read the storage while they run, and methods that also write.
_STORAGE_READS = ("_write_file", "_get_filename")
_STORAGE_WRITES = ("copy_", "fill_", "resize_", "__setitem__", "_byteswap", "_set_from_file")
#: Storage methods that replace or share the storage's memory.
_STORAGE_KEEPS = (
    "_share_cuda_", "_share_fd_cpu_", "_share_filename_cpu_", "_swap_data_ptr_", "_resize_with_addr_",
)  # fmt: skip
#: Functions whose C++ code reads numbers, such as the lengths of packed sequences, between operations: their
#: integer tensor arguments stay on the device as long as they run.
_READ_LENGTHS = ("lstm", "gru", "rnn_tanh", "rnn_relu", "_pad_packed_sequence")
_READ_OFFSETS = ("tensor_split",)
#: TorchScript methods that write files, unseen by Python.
_SCRIPT_SAVES = ("save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile")
#: A TorchScript operation that the dispatcher does not know.
_SCRIPT_READS = "prim::tolist"
#: Modules that ask for addresses only to compare them or to copy from them at once.
_PASSING = ("torch.nn.", "safetensors.", "transformers.", "accelerate.")
_NEW = object()


class Escapes:
    """Patches that keep storages on the device for readers past the dispatcher, in any thread."""

    def __init__(
        self, storages: Storages, mover: Mover, know: Callable[[torch.Tensor, Any], Held | None]
    ) -> None:
        """Prepare the patches.

        Args:
            storages: registry of the known storages.
            mover: reloads storages.
            know: returns the record of a tensor's storage; registers an unknown storage first.
        """
        self._storages = storages
        self._mover = mover
        self._know = know
        self._replaced: list[tuple[Any, str, Any]] = []
        self._awhile: deque[tuple[int, Held]] = deque()  # (iteration in which lent, storage)
        self._steps = 0
        self._scripts: dict[tuple[str, str], bool] = {}  # whether a script function reads past the dispatcher

    # --- lending

    def _held(self, values: Iterable[Any]) -> list[Held]:
        """Return the known storages among arguments: tensors, lists of tensors, storages."""
        storages: list[Any] = []
        for value in _values(values):
            if isinstance(value, torch.Tensor):
                with contextlib.suppress(NotImplementedError, RuntimeError):  # no storage
                    storages += [storage for _, storage in storages_in(_plain(value))]
            elif isinstance(value, torch.storage.TypedStorage):
                storages.append(value._untyped_storage)
            elif isinstance(value, torch.UntypedStorage):
                storages.append(value)
        find = self._storages.find
        return [held for storage in storages if (held := find(storage)) is not None]

    @contextlib.contextmanager
    def lent(self, values: Iterable[Any], *, writes: bool = False) -> Iterator[list[tuple[Held, bool]]]:
        """Reload the storages among the values; afterwards, offload again those that had been offloaded."""
        lent: list[tuple[Held, bool]] = []
        try:
            for held in self._held(values):
                lent.append((held, False))
                lent[-1] = held, self._mover.lend(held)
            yield lent
        finally:
            for held, away in lent:
                self._mover.returned(held, away=away, wrote=writes)

    def _known(self, value: Any) -> list[Held]:
        """Return the records of a tensor's storages, or of a storage; register unknown storages first."""
        if isinstance(value, torch.UntypedStorage):
            pairs = [(torch.empty(0, dtype=torch.uint8, device=value.device), value)]
        else:
            pairs = []
            with contextlib.suppress(NotImplementedError, RuntimeError):  # no storage
                pairs = [*storages_in(_plain(value))]
        found = (self._know(plain, storage) for plain, storage in pairs)
        return [held for held in found if held is not None]

    def keep(self, value: Any) -> None:
        """Keep a tensor's storages, or a storage, on the device for good."""
        for held in self._known(value):
            self._mover.keep(held)

    def _keep_awhile(self, value: Any) -> None:
        """Keep a tensor's storages, or a storage, on the device until the end of the next iteration."""
        for held in self._known(value):
            self._mover.lend(held)
            self._awhile.append((self._steps, held))

    def step(self) -> None:
        """End an iteration: return the storages lent before this iteration."""
        self._steps += 1
        while self._awhile and self._awhile[0][0] + 2 <= self._steps:
            _, held = self._awhile.popleft()
            self._mover.returned(held, away=False, wrote=True)

    # --- replaced functions

    def install(self) -> None:
        """Replace the functions."""
        tensor, storage = torch.Tensor, torch.UntypedStorage
        writes = functools.partial(self._lends, writes=True)
        self._each(tensor, _TENSOR_READS, self._lends)
        self._each(tensor, _TENSOR_WRITES, writes)
        self._each(storage, _STORAGE_READS, self._lends)
        self._each(storage, _STORAGE_WRITES, writes)
        self._each(storage, _STORAGE_KEEPS, self._keeps)
        self._each(tensor, ("data_ptr", "const_data_ptr"), self._address)
        self._each(storage, ("data_ptr",), self._address)
        self._each(tensor, ("numpy", "__dlpack__"), self._keeps)
        self._each(torch._C, ("_to_dlpack",), self._keeps)
        self._each(torch.utils.dlpack, ("to_dlpack",), self._keeps)
        self._each(storage, ("nbytes", "__len__"), self._size)
        self._each(storage, ("__getitem__",), self._entry)
        self._each(torch._C.PyTorchFileWriter, ("write_record",), self._lends)
        self._each(torch._tensor_str, ("_str",), self._lends)
        self._each(torch, ("tensor", "as_tensor", "asarray", "set_rng_state"), self._lends)
        self._each(torch.random, ("set_rng_state",), self._lends)
        self._each(tensor, ("new_tensor",), self._lends)
        self._each(torch._VF, _READ_LENGTHS, self._lends_integers)
        self._each(torch, (*_READ_LENGTHS, *_READ_OFFSETS), self._lends_integers)
        self._each(tensor, _READ_OFFSETS, self._lends_integers)
        self._each(torch._C.ScriptModule, _SCRIPT_SAVES, self._alone)
        self._each(torch._C.ScriptFunction, _SCRIPT_SAVES, self._alone)
        self._each(torch._C.ScriptFunction, ("__call__",), self._script)
        self._each(torch._C.ScriptMethod, ("__call__",), self._script)
        self._each(torch._C, ("_pickle_save",), self._alone)
        if "__dlpack_c_exchange_api__" in vars(tensor):  # C functions; else __dlpack__ is called
            self._replaced.append((tensor, "__dlpack_c_exchange_api__", tensor.__dlpack_c_exchange_api__))
            del tensor.__dlpack_c_exchange_api__

    def _each(self, owner: Any, names: Iterable[str], instead: Callable[[Any], Any]) -> None:
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

    def _lends(self, function: Any, *, writes: bool = False) -> Any:
        @functools.wraps(function)
        def lends(*args: Any, **kwargs: Any) -> Any:
            with self.lent((*args, *kwargs.values()), writes=writes):
                return function(*args, **kwargs)

        return lends

    def _lends_integers(self, function: Any) -> Any:
        @functools.wraps(function)
        def lends(*args: Any, **kwargs: Any) -> Any:
            given = [value for value in (*args, *kwargs.values()) if _is_of_integers(value)]
            with self.lent(given):
                return function(*args, **kwargs)

        return lends

    def _alone(self, function: Any) -> Any:
        """Wrap a function to run with all storages reloaded and nothing moving meanwhile."""

        @functools.wraps(function)
        def alone(*args: Any, **kwargs: Any) -> Any:
            self._mover.bring_all()
            with _DisableTorchDispatch():
                return function(*args, **kwargs)

        return alone

    def _script(self, call: Any) -> Any:
        """Wrap a call of TorchScript: the dispatcher sees the operations, but not direct reads of memory."""
        alone = self._alone(call)

        @functools.wraps(call)
        def called(script: Any, *args: Any, **kwargs: Any) -> Any:
            return (alone if self._reads(script) else call)(script, *args, **kwargs)

        return called

    def _reads(self, script: Any) -> bool:
        if isinstance(script, torch._C.ScriptMethod):
            key = script.owner._type().qualified_name(), script.name
        else:
            key = script.qualified_name, ""
        if key not in self._scripts:
            inside = script.inlined_graph.findAllNodes(_SCRIPT_READS, recurse=True)
            self._scripts[key] = len(inside) > 0
        return self._scripts[key]

    def _keeps(self, function: Any) -> Any:
        @functools.wraps(function)
        def keeps(value: Any, *args: Any, **kwargs: Any) -> Any:
            self.keep(value)
            return function(value, *args, **kwargs)

        return keeps

    def _address(self, function: Any) -> Any:
        @functools.wraps(function)
        def address(value: Any) -> Any:
            asked_by = _asked_by()
            if asked_by == "torch.serialization" and (known := self._held((value,))):
                return known[0].number + 1  # only compared, to detect shared storages
            if asked_by.startswith(_PASSING):
                self._keep_awhile(value)
            else:
                self.keep(value)
            return function(value)

        return address

    def _size(self, function: Any) -> Any:
        @functools.wraps(function)
        def size(storage: Any) -> int:
            held = self._storages.find(storage)
            return held.size if held is not None and held.state == AWAY else function(storage)

        return size

    def _entry(self, function: Any) -> Any:
        @functools.wraps(function)
        def entry(storage: Any, key: Any) -> Any:
            if isinstance(key, slice):  # the slice is a storage of its own, in the same memory
                self.keep(storage)
                return function(storage, key)
            with self.lent((storage,)):
                return function(storage, key)

        return entry


def _values(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the arguments and the items of lists; lists of numbers, possibly long, are skipped."""
    for value in values:
        if isinstance(value, (list, tuple)):
            if value and isinstance(value[0], (torch.Tensor, list, tuple)):
                yield from _values(value)
        else:
            yield value


def _is_of_integers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor under the transforms of ``torch.func``."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _asked_by() -> str:
    """Return the name of the module that asked for an address."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if (name := str(frame.f_globals.get("__name__"))) not in ("torch.storage", "torch._tensor"):
            return name
        frame = frame.f_back
    return ""
