"""The events of a recording in their order, the living buffers, and the memory behind an array."""

from __future__ import annotations

import struct
import sys
import threading
import time
import weakref
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from traces.trace import EventType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


class Memory(NamedTuple):
    """The memory of an array and of all views.

    Attributes:
        key: the same number for all arrays in this memory, while one of them is alive.
        root: the object that lives as long as the memory, or the last array on the way to that object;
            supports weak references.
        size: bytes.
    """

    key: int
    root: Any
    size: int


def root_of(array: Any) -> Any:
    """Return the array that owns the memory, or the owner that is no array: a memory map, or bytes."""
    base = array.base
    while base is not None:
        array, base = base, _beneath(base)
    return array


def _beneath(thing: Any) -> Any:
    """Return the object that keeps the memory of ``thing``; None if ``thing`` keeps the memory itself."""
    return thing.obj if type(thing) is memoryview else getattr(thing, "base", None)


def memory_of(array: Any) -> Memory:
    """Return the memory of an array of NumPy or CuPy."""
    holder = root_of(array)
    if isinstance(holder, np.ndarray):
        return Memory(id(holder), holder, holder.nbytes)
    if not isinstance(array, np.ndarray):
        memory = _pointer(holder).mem
        return Memory(id(memory), holder, memory.size)
    if type(holder).__weakrefoffset__:
        return Memory(id(holder), holder, _size(holder, array))
    last = _last_array(array)
    return Memory(id(holder), last, last.nbytes)


def address_of(array: Any) -> int:
    """Return the address at which the memory of an array begins."""
    if isinstance(array, np.ndarray):
        return int(np.ndarray.__array_interface__.__get__(_last_array(array))["data"][0])
    return int(_pointer(root_of(array)).mem.ptr)


def _last_array(array: Any) -> Any:
    """Return the array around memory whose owner is no array."""
    while isinstance(base := _beneath(array), np.ndarray):
        array = base
    return array


def _size(holder: Any, array: Any) -> int:
    """Return the bytes of an owner that is no array; those of the array around the memory if unknown."""
    try:
        return memoryview(holder).nbytes
    except TypeError:
        return int(_last_array(array).nbytes)


def _pointer(array: Any) -> Any:
    """Return the memory pointer of CuPy's array, without the escape that a watched array's `data` reports."""
    library: Any = getattr(type(array), "plain_class", type(array))
    return library.data.__get__(array)


def device_of(array: Any) -> int:
    """Return the index of the array's device; 0 for NumPy's arrays."""
    return 0 if isinstance(array, np.ndarray) else int(array.device.id)


#: Fields of an event, int64 each; ``began`` is the time in ns at which the event's operation began.
FIELDS = ("kind", "buffer", "size", "time_ns", "began", "operation", "address", "device", "thread", "frame")
#: Folders of this package and NumPy, whose source lines are not the program's.
_FOLDERS = (str(Path(__file__).parent), str(Path(np.__file__).parent))

_ALLOC, _FREE, _READ, _WRITE, _MARK = map(
    int, (EventType.ALLOC, EventType.FREE, EventType.READ, EventType.WRITE, EventType.MARK)
)


_PACK = struct.Struct(f"{len(FIELDS)}q").pack  # the fastest compact way found to store a row


class _Root(weakref.ref[Any]):
    """A weak reference to the object that keeps a buffer's memory alive."""

    __slots__ = ("buffer", "key", "memory")
    buffer: int
    key: int  #: identity of the referenced object
    memory: int  #: key of the object's memory


class Rows:
    """Events in their order. All methods may be called by any thread: each row is added atomically.

    Attributes:
        addresses: record the addresses of buffers, at a small cost for each.
        late: number of arrays that were operands before they were known, so that their time of creation is
            unknown.
    """

    def __init__(self, *, frames: bool) -> None:
        self._values = array("q")
        self._roots: dict[int, _Root] = {}  # living roots, by identity
        self._buffers: dict[int, list[int]] = {}  # by the memory's key: buffer, and number of its roots
        self._names: dict[str, int] = {}
        self._threads: dict[int, int] = {}
        self._count = 0
        self._lock = threading.RLock()  # reentrant: under the lock an object may die, and add a row
        self._frames = frames
        self._open = True
        self.addresses = False
        self.late = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The strings behind the indices of operations and frames."""
        return tuple(self._names)

    def name(self, text: str) -> int:
        """Return the index of a string."""
        found = self._names.get(text)
        if found is None:
            with self._lock:
                found = self._names.setdefault(text, len(self._names))
        return found

    def table(self) -> NDArray[np.int64]:
        """Return the events so far, int64[n, fields]."""
        return np.array(self._values, np.int64).reshape(-1, len(FIELDS))

    def close(self) -> None:
        """Stop recording frees: later deaths of arrays add no event."""
        self._open = False

    def leave_to_the_parent(self) -> None:
        """Reset the lock in a forked child, where the thread that could release the lock does not exist."""
        self._lock, self._open = threading.RLock(), False

    def known(self, thing: Any) -> int | None:
        """Return the buffer of an array, None if the array is unknown."""
        holder = root_of(thing)
        root = self._roots.get(id(holder))
        if root is not None:
            return root.buffer
        if type(holder) is np.ndarray:  # the owner of all its views
            return None
        memory = memory_of(thing)
        with self._lock:
            shared = self._buffers.get(memory.key)
            return None if shared is None else self._join(memory, shared)

    def buffer(self, thing: Any) -> int:
        """Return the buffer of an array, adding an alloc event if the buffer is new."""
        found = self.known(thing)
        return self.begin(thing) if found is None else found

    def begin(self, thing: Any, operation: int = -1, began: int = -1, now: int = 0) -> int:
        """Add the buffer of an unknown array, and return the buffer."""
        memory = memory_of(thing)
        address = address_of(thing) if self.addresses else -1
        now = now or time.monotonic_ns()
        with self._lock:
            shared = self._buffers.get(memory.key)
            if shared is None:  # else another thread was faster
                shared = self._buffers[memory.key] = [self._count, 0]
                self._count += 1
                self._add((_ALLOC, shared[0], memory.size, now, began, operation, address, device_of(thing)))
            return self._join(memory, shared)

    def _join(self, memory: Memory, shared: list[int]) -> int:
        if id(memory.root) in self._roots:
            return shared[0]
        root = _Root(memory.root, self._died)
        root.buffer, root.key, root.memory = shared[0], id(memory.root), memory.key
        shared[1] += 1
        self._roots[root.key] = root
        return shared[0]

    def _died(self, root: _Root) -> None:
        with self._lock:
            del self._roots[root.key]
            shared = self._buffers[root.memory]
            shared[1] -= 1
            if shared[1] == 0:
                del self._buffers[root.memory]
                if self._open:
                    self._add((_FREE, root.buffer, 0, time.monotonic_ns(), -1, -1, -1, 0))

    def accesses(
        self, reads: Iterable[int], writes: Iterable[int], operation: int, began: int, now: int
    ) -> None:
        """Add events for buffers that are read and written."""
        rest = (0, now, began, operation, -1, 0)
        events = [(_READ, buffer, *rest) for buffer in reads]
        events += [(_WRITE, buffer, *rest) for buffer in writes]
        self._add(*events)

    def mark(self, name: str) -> None:
        """Add a mark: a phase begins, or an iteration ends."""
        self._add((_MARK, -1, 0, time.monotonic_ns(), -1, self.name(name), -1, 0))

    def _add(self, *events: tuple[int, ...]) -> None:
        """Add events with the fields of `FIELDS`, of the calling thread."""
        me = threading.get_ident()
        thread = self._threads.get(me)
        if thread is None:
            with self._lock:
                thread = self._threads.setdefault(me, len(self._threads))
        frame = self._frame() if self._frames else -1
        for event in events:
            self._values.frombytes(_PACK(*event, thread, frame))

    def _frame(self) -> int:
        frame = sys._getframe(2)
        while frame.f_code.co_filename.startswith(_FOLDERS):
            if frame.f_back is None:
                return -1
            frame = frame.f_back
        return self.name(f"{frame.f_code.co_filename}:{frame.f_lineno}")
