"""Ledger of the buffers of living storages, and of their roles in the program."""

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

from mempool.recording.torch.rows import ALLOC, FREE, MODULE, NAME, PHASE, POINTER, SIZE, THREAD, Rows
from traces.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def is_wrapper(kind: Any) -> bool:
    """Return true if tensors of this class, such as DTensor, have their memory in other tensors."""
    return (
        issubclass(kind, torch.Tensor)
        and not issubclass(kind, FakeTensor)
        and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with a tensor's memory: itself, or its parts; empty if unknown."""
    if hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, FakeTensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), torch.Tensor):
                yield from plain_tensors(part)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in _COMPRESSED:
        yield from (getattr(tensor, part)() for part in _COMPRESSED[tensor.layout])
    elif torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        yield from plain_tensors(torch._C._functorch.get_unwrapped(tensor))
    elif tensor.layout is torch.strided:
        yield tensor


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_in(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors_in(entry)


def storages_in(value: Any) -> Sequence[tuple[torch.Tensor, Any]]:
    """Return the storages of an argument or result of an operation, each with one of its tensors."""
    kind = type(value)
    if kind in _PLAIN:
        try:
            return ((value, value.untyped_storage()),)
        except (NotImplementedError, RuntimeError):  # a sparse or opaque tensor
            return [(plain, plain.untyped_storage()) for plain in plain_tensors(value)]
    if kind is list or kind is tuple:
        if _PLAIN.issuperset(map(type, value)):  # the long lists of foreach operations
            with contextlib.suppress(NotImplementedError, RuntimeError):
                return [(entry, entry.untyped_storage()) for entry in value]
        return [pair for entry in value if entry is not None for pair in storages_in(entry)]
    return [
        (plain, plain.untyped_storage()) for tensor in tensors_in(value) for plain in plain_tensors(tensor)
    ]


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, FakeTensor))


_NOTHING = 99, ""
#: Roles of a buffer by its holder, the strongest claim first.
OWNED = ("parameters", "module_buffers", "gradients", "optimizer_state", "inputs")


class Known(weakref.ref[Any]):
    """A living storage.

    Attributes:
        key: the storage's ``id``, which Python may reuse after the storage's end.
        buffer: the number in the trace.
        size: bytes.
        device: number of the device.
        inside: true if made inside a module.
        pointer: address of the memory, if no operation made the storage; else 0.
    """

    __slots__ = ("buffer", "device", "inside", "key", "pointer", "size")

    buffer: int
    device: int
    inside: bool
    key: int
    pointer: int
    size: int


class Ledger:
    """Registry of the living storages seen so far, by identity.

    A storage's Python object lives as long as the storage, so a weak reference to it reports the storage's
    end. The end may occur at any moment, in any thread, and only appends a row.

    Attributes:
        known: the living storages, by ``id``.
        devices: the devices seen so far, in order.
        categories: for each buffer, the strength of the claim, and the category.
        mode: the fake mode whose tensors count as memory, unlike tensors of other fake modes, with which
            DTensor infers shapes.
        apart: true once a wrapper's operation was decomposed, which may infer shapes with another fake mode.
        modules: number of the module that owns a buffer, if other than the module that made the buffer.
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
        self._outside: dict[int, Known] = {}  # storages that no operation made, by address
        self._others: dict[int, list[int]] = {}  # additional storages of shared buffers

    def meet(
        self, tensor: torch.Tensor, storage: Any, head: int, time_ns: int, *, made: bool
    ) -> Known | None:
        """Register a storage when first seen; return None if the storage has no memory.

        Args:
            tensor: a tensor in the storage.
            storage: the storage.
            head: head of the operation's rows.
            time_ns: time at which the operation began.
            made: true if the operation made the storage; false for an older storage among the inputs.
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

    def scratch(self, loss: torch.Tensor, head: int, time_ns: int) -> None:
        """Record the temporary buffer of a kernel for a reduced loss, and its end.

        An unreduced loss has no such buffer. If addresses are recorded, the pool records the buffer.
        """
        known = None if self._places else self.known.get(id(loss.untyped_storage()))
        if known is not None and loss.dim() == 0 and known.size > loss.element_size():
            buffer = next(self._numbers)
            size_head = SIZE | known.device << THREAD
            ends = FREE, buffer, self._now()
            self._rows.extend((head | ALLOC, buffer, time_ns, size_head, buffer, known.size, *ends))

    def _is_there(self, known: Known) -> bool:
        """Return true if a known storage has this memory, such as NumPy's; both are one buffer."""
        twin = self._outside.setdefault(known.pointer, known)
        if twin is known or twin() is None or twin.size != known.size:
            self._outside[known.pointer] = known
            return False
        known.buffer = twin.buffer
        self._others.setdefault(known.buffer, []).append(0)
        return True

    def resized(self, known: Known, storage: Any, head: int, time_ns: int) -> None:
        """Handle a resized storage, which in the trace is another buffer."""
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
        """Claim a buffer for a category, unless a stronger claim exists; lower numbers are stronger."""
        if self.categories.get(buffer, _NOTHING)[0] > strength:
            self.categories[buffer] = strength, category

    def own_input(self, tensor: torch.Tensor) -> None:
        """Claim an argument of the outermost module as an input, unless a module made it."""
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            known = self.known.get(id(storage)) or self.meet(plain, storage, 0, self._now(), made=False)
            if known is not None and not known.inside:
                self.claim(known.buffer, "inputs", len(OWNED) - 1)

    def own(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        """Claim the storages of some tensors at the user's request, which overrides all other claims."""
        for tensor in tensors:
            self.own_one(category, tensor, -1, strength=-1)

    def own_one(
        self, category: str, tensor: torch.Tensor | None, module: int, strength: int | None = None
    ) -> None:
        """Claim the storages of a tensor.

        Args:
            category: the category.
            tensor: owner of the storages; None: no storages.
            module: number of the module that owns the storages; -1: unknown.
            strength: strength of the claim; by default the category's.
        """
        for plain, storage in () if tensor is None else storages_in(tensor):
            known = self.known.get(id(storage))
            if known is not None and self.categories.get(known.buffer, _NOTHING)[1] is category:
                continue  # already claimed
            known = known or self.meet(plain, storage, 0, self._now(), made=True)
            if known is not None:
                self.claim(known.buffer, category, OWNED.index(category) if strength is None else strength)
                if module >= 0:
                    self.modules.setdefault(known.buffer, module)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record storages that are resized outside operations, as by FSDP."""
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
    """Return the head of a row, without kind and phase."""
    return (thread + 1) << THREAD | (name + 1) << NAME | (module + 1) << MODULE


def _address(storage: Any) -> int:
    return 0 if storage.device.type == "meta" else int(storage.data_ptr())  # 0 for fake storages


def _size(storage: Any) -> int:
    try:
        return int(storage.nbytes())
    except Exception as error:  # torch's error classes are not public
        raise TraceError(f"a tensor's size depends on data: {str(error).splitlines()[0][:200]}") from error
