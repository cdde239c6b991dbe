"""Which buffer a storage is, while it lives, and what it is to the program."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from traces.errors import TraceError
from traces.recorders.torch.rows import ALLOC, FREE, MODULE, NAME, PHASE, POINTER, SIZE, THREAD, Rows
from traces.recorders.torch.storages import plain_tensors, storages_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_NOTHING = 99, ""
#: What a buffer can be by what holds it, the strongest claim first.
OWNED = ("parameters", "module_buffers", "gradients", "optimizer_state", "inputs")


class Known(weakref.ref[Any]):
    """A living storage.

    Attributes:
        key: its ``id``, which another may have when this one is gone.
        buffer: its number in the trace.
        size: bytes.
        device: number of the device.
        inside: whether it was made inside a module.
        pointer: where its memory is, if no operation made it; else 0.
    """

    __slots__ = ("buffer", "device", "inside", "key", "pointer", "size")

    buffer: int
    device: int
    inside: bool
    key: int
    pointer: int
    size: int


class Ledger:
    """The storages that were met and are alive, by identity.

    A storage's Python object lives as long as the storage, so that a weak reference to it tells of its end;
    that may come at any moment, in any thread, and only appends a row.

    Attributes:
        known: of the living storages, by ``id``.
        devices: the devices that were met, in order.
        categories: of a buffer, how strong the claim on it is, and its category.
        mode: the fake mode whose tensors are memory; those of others, which DTensor asks for shapes, are not.
        apart: whether any operation of a wrapper was taken apart, which may ask so.
        modules: number of the module that a buffer belongs to, where its maker is not what tells it.
    """

    def __init__(self, rows: Rows, now: Callable[[], int], *, places: bool = False) -> None:
        self._rows, self._now, self._places = rows, now, places
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self.known: dict[int, Known] = {}
        self.devices: dict[torch.device, int] = {}
        self.categories: dict[int, tuple[int, str]] = {}
        self.modules: dict[int, int] = {}
        self.mode: Any = None
        self.apart = False
        self._outside: dict[int, Known] = {}  # what no operation made, by where its memory is
        self._others: dict[int, list[int]] = {}  # of a buffer with several storages, an entry for all but one

    def meet(
        self, tensor: torch.Tensor, storage: Any, head: int, time_ns: int, *, made: bool
    ) -> Known | None:
        """A storage that is seen for the first time; None where it is no memory.

        Args:
            tensor: one that lies in it.
            storage: it.
            head: of the rows of the operation.
            time_ns: when that began.
            made: whether the operation made it; if not it was there before, and is an input.
        """
        device = tensor.device
        if device.type == "meta" or (isinstance(tensor, FakeTensor) and not self._is_memory(tensor)):
            return None
        key = id(storage)
        with self._lock:
            if (there := self.known.get(key)) is not None:
                return there
            known = Known(storage, self._end)
            known.key, known.size = key, _size(storage)
            known.device = self.devices.setdefault(device, len(self.devices))
            known.inside = head >> MODULE > 0
            known.pointer = 0 if made else _address(storage)
            if known.pointer == 0 or not self._is_there(known):
                self._begin(known, storage, head, time_ns)
            self.known[key] = known
        if not made:
            kind = "parameters" if isinstance(tensor, torch.nn.Parameter) else "inputs"
            self.claim(known.buffer, kind, len(OWNED))
        return known

    def _is_memory(self, tensor: FakeTensor) -> bool:
        if self.mode is None and not self.apart:
            self.mode = tensor.fake_mode
        return tensor.fake_mode is self.mode

    def _begin(self, known: Known, storage: Any, head: int, time_ns: int) -> None:
        known.buffer = buffer = next(self._numbers)
        size_head = SIZE | known.device << THREAD
        self._rows.extend((head | ALLOC, buffer, time_ns, size_head, buffer, known.size))
        if self._places:
            place = (POINTER, buffer, _address(storage), POINTER | 1 << PHASE, buffer, time.perf_counter_ns())
            self._rows.extend(place)

    def _is_there(self, known: Known) -> bool:
        """Whether another storage is known in the same memory, such as NumPy's: then they are one buffer."""
        twin = self._outside.setdefault(known.pointer, known)
        if twin is known or twin() is None or twin.size != known.size:
            self._outside[known.pointer] = known
            return False
        known.buffer = twin.buffer
        self._others.setdefault(known.buffer, []).append(0)
        return True

    def resized(self, known: Known, storage: Any, head: int, time_ns: int) -> None:
        """A storage that has another size than before: for the trace, another buffer in its place."""
        with self._lock:
            size = _size(storage)
            if size == known.size:
                return
            before, known.size = known.buffer, size
            self._rows.extend((FREE, before, self._now()))
            self._begin(known, storage, head, time_ns)
            if before in self.categories:
                self.categories[known.buffer] = self.categories[before]
            if before in self.modules:
                self.modules[known.buffer] = self.modules[before]

    def _end(self, known: Known) -> None:
        if self.known.get(known.key) is known:
            del self.known[known.key]
        if known.pointer and self._outside.get(known.pointer) is known:
            del self._outside[known.pointer]
        if self._others.get(known.buffer):
            self._others[known.buffer].pop()
            return
        self._rows.extend((FREE, known.buffer, self._now()))

    def claim(self, buffer: int, category: str, strength: int) -> None:
        """Say what a buffer is, unless a stronger claim was made; the lowest number is the strongest."""
        if self.categories.get(buffer, _NOTHING)[0] > strength:
            self.categories[buffer] = strength, category

    def own_input(self, tensor: torch.Tensor) -> None:
        """Say that a tensor is given to the program's outermost module, if none made it."""
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            known = self.known.get(id(storage)) or self.meet(plain, storage, 0, self._now(), made=False)
            if known is not None and not known.inside:
                self.claim(known.buffer, "inputs", len(OWNED) - 1)

    def own(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        """Say what the storages of some tensors are, as the user does, who knows best."""
        for tensor in tensors:
            self.own_one(category, tensor, -1, strength=-1)

    def own_one(
        self, category: str, tensor: torch.Tensor | None, module: int, strength: int | None = None
    ) -> None:
        """Say what the storages of a tensor are.

        Args:
            category: what.
            tensor: whose storages; None: of none.
            module: number of the module that they belong to; -1: not said.
            strength: of the claim; by default that of the category.
        """
        for plain, storage in () if tensor is None else storages_in(tensor):
            known = self.known.get(id(storage))
            if known is not None and self.categories.get(known.buffer, _NOTHING)[1] is category:
                continue  # as has been said before
            known = known or self.meet(plain, storage, 0, self._now(), made=True)
            if known is not None:
                self.claim(known.buffer, category, OWNED.index(category) if strength is None else strength)
                if module >= 0:
                    self.modules.setdefault(known.buffer, module)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See storages that are resized past all operations, as FSDP does."""
        before = torch.UntypedStorage.resize_

        @functools.wraps(before)
        def resize(storage: Any, size: int) -> Any:
            result = before(storage, size)
            if (known := self.known.get(id(storage))) is not None:
                self.resized(known, storage, 0, self._now())
            return result

        torch.UntypedStorage.resize_ = resize
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = before


def head_of(thread: int, name: int, module: int) -> int:
    """The head of a row, without its kind and phase."""
    return (thread + 1) << THREAD | (name + 1) << NAME | (module + 1) << MODULE


def _address(storage: Any) -> int:
    return 0 if storage.device.type == "meta" else int(storage.data_ptr())  # as a fake one's is


def _size(storage: Any) -> int:
    try:
        return int(storage.nbytes())
    except Exception as error:  # torch's own are not public
        raise TraceError(f"a tensor's size depends on data: {str(error).splitlines()[0][:200]}") from error
