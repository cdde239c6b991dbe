"""Functions of PyTorch that read or write a storage past the dispatcher, while it may be away.

While swapping is installed they are replaced in their classes: what they use is here as long as they run.
What gives an address away, for nobody knows how long, keeps the storage here for good.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from mempool.torch.swapping.storages import AWAY
from traces.recorders.torch.storages import storages_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from mempool.torch.swapping.mover import Mover
    from mempool.torch.swapping.storages import Held, Storages

#: Methods of tensors that read it while they run, and those that write it too.
_TENSOR_READS = ("tolist", "item", "__float__", "__int__", "__bool__", "__index__", "__complex__")
_TENSOR_WRITES = ("apply_", "map_", "map2_")
#: Of storages, likewise.
_STORAGE_READS = ("_write_file", "_get_filename")
_STORAGE_WRITES = ("copy_", "fill_", "resize_", "__setitem__", "_byteswap", "_set_from_file")
#: Of storages: their memory becomes another, or somebody else's too.
_STORAGE_KEEPS = (
    "_share_cuda_", "_share_fd_cpu_", "_share_filename_cpu_", "_swap_data_ptr_", "_resize_with_addr_",
)  # fmt: skip
#: Who asks for addresses to compare them or to copy from them at once.
_PASSING = ("torch.nn.", "safetensors.", "transformers.", "accelerate.")
_NEW = object()


def _there(owner: Any, names: Iterable[str]) -> list[str]:
    """Those that this version of PyTorch has: 2.11 lacks `const_data_ptr` and `_swap_data_ptr_`."""
    return [name for name in names if hasattr(owner, name)]


class Escapes:
    """Has storages here for what reads them past the dispatcher, in any thread."""

    def __init__(
        self, storages: Storages, mover: Mover, know: Callable[[torch.Tensor, Any], Held | None]
    ) -> None:
        """Of a tensor and its storage, `know` says what is known, from now on if it was not known before."""
        self._storages = storages
        self._mover = mover
        self._know = know
        self._replaced: list[tuple[Any, str, Any]] = []
        self._awhile: deque[tuple[int, Held]] = deque()  # lent in which iteration
        self._steps = 0

    # --- what is used

    def _held(self, values: Iterable[Any]) -> list[Held]:
        """The known storages among arguments: tensors, lists of them, storages."""
        storages: list[Any] = []
        for value in _values(values):
            if isinstance(value, torch.Tensor):
                with contextlib.suppress(NotImplementedError, RuntimeError):  # it has none
                    storages += [storage for _, storage in storages_in(_plain(value))]
            elif isinstance(value, torch.storage.TypedStorage):
                storages.append(value._untyped_storage)
            elif isinstance(value, torch.UntypedStorage):
                storages.append(value)
        find = self._storages.find
        return [held for storage in storages if (held := find(storage)) is not None]

    @contextlib.contextmanager
    def lent(self, values: Iterable[Any], *, writes: bool = False) -> Iterator[list[tuple[Held, bool]]]:
        """Have the storages among values here; afterwards those that were away are so again."""
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
        """What is known of a tensor's storages, or of a storage, from now on if not before."""
        if isinstance(value, torch.UntypedStorage):
            pairs = [(torch.empty(0, dtype=torch.uint8, device=value.device), value)]
        else:
            pairs = []
            with contextlib.suppress(NotImplementedError, RuntimeError):  # it has none
                pairs = [*storages_in(_plain(value))]
        found = (self._know(plain, storage) for plain, storage in pairs)
        return [held for held in found if held is not None]

    def keep(self, value: Any) -> None:
        """Keep a tensor's storages, or a storage, here for good."""
        for held in self._known(value):
            self._mover.keep(held)

    def _keep_awhile(self, value: Any) -> None:
        """Likewise, until an iteration from now."""
        for held in self._known(value):
            self._mover.lend(held)
            self._awhile.append((self._steps, held))

    def step(self) -> None:
        """An iteration has ended."""
        self._steps += 1
        while self._awhile and self._awhile[0][0] + 2 <= self._steps:
            _, held = self._awhile.popleft()
            self._mover.returned(held, away=False, wrote=True)

    # --- replaced functions

    def install(self) -> None:
        """Replace them."""
        tensor, storage = torch.Tensor, torch.UntypedStorage
        for name in _TENSOR_READS:
            self._replace(tensor, name, self._lends(getattr(tensor, name)))
        for name in _TENSOR_WRITES:
            self._replace(tensor, name, self._lends(getattr(tensor, name), writes=True))
        for name in _STORAGE_READS:
            self._replace(storage, name, self._lends(getattr(storage, name)))
        for name in _STORAGE_WRITES:
            self._replace(storage, name, self._lends(getattr(storage, name), writes=True))
        for name in _there(storage, _STORAGE_KEEPS):
            self._replace(storage, name, self._keeps(getattr(storage, name)))
        for name in _there(tensor, ("data_ptr", "const_data_ptr")):
            self._replace(tensor, name, self._address(getattr(tensor, name)))
        self._replace(storage, "data_ptr", self._address(storage.data_ptr))
        for owner, name in (
            (tensor, "numpy"),
            (tensor, "__dlpack__"),
            (torch._C, "_to_dlpack"),
            (torch.utils.dlpack, "to_dlpack"),
        ):
            self._replace(owner, name, self._keeps(getattr(owner, name)))
        self._replace(storage, "nbytes", self._size(storage.nbytes))
        self._replace(storage, "__len__", self._size(storage.__len__))
        self._replace(storage, "__getitem__", self._entry(storage.__getitem__))
        for owner, name in (
            (torch._C.PyTorchFileWriter, "write_record"), (torch._tensor_str, "_str"),
            (torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"), (tensor, "new_tensor"),
            (torch, "set_rng_state"), (torch.random, "set_rng_state"),
        ):  # fmt: skip
            self._replace(owner, name, self._lends(getattr(owner, name)))
        if "__dlpack_c_exchange_api__" in vars(tensor):  # C functions: without them __dlpack__ is called
            self._replaced.append((tensor, "__dlpack_c_exchange_api__", tensor.__dlpack_c_exchange_api__))
            del tensor.__dlpack_c_exchange_api__

    def remove(self) -> None:
        """Have all as it was."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is _NEW:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        self._replaced.append((owner, name, vars(owner).get(name, _NEW)))
        setattr(owner, name, function)

    def _lends(self, function: Any, *, writes: bool = False) -> Any:
        @functools.wraps(function)
        def lends(*args: Any, **kwargs: Any) -> Any:
            with self.lent((*args, *kwargs.values()), writes=writes):
                return function(*args, **kwargs)

        return lends

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
                return known[0].number + 1  # it only asks whether two are one
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
            if isinstance(key, slice):  # it becomes a storage of its own, in the same memory
                self.keep(storage)
                return function(storage, key)
            with self.lent((storage,)):
                return function(storage, key)

        return entry


def _values(values: Iterable[Any]) -> Iterator[Any]:
    """Of arguments and the lists among them; a list of numbers may be long, and is passed over."""
    for value in values:
        if isinstance(value, (list, tuple)):
            if value and isinstance(value[0], (torch.Tensor, list, tuple)):
                yield from _values(value)
        else:
            yield value


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Under the transforms of ``torch.func``."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _asked_by() -> str:
    """The module that asked for an address."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if (name := str(frame.f_globals.get("__name__"))) not in ("torch.storage", "torch._tensor"):
            return name
        frame = frame.f_back
    return ""
