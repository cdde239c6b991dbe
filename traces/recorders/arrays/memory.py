"""Which memory an array lies in, and how long that lives."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Memory(NamedTuple):
    """The memory of an array and of all its views.

    Attributes:
        key: the same number for all arrays in this memory, while one of them is alive.
        root: what lives as long as the memory, or the last array on the way to it; has weak references.
        size: bytes.
    """

    key: int
    root: Any
    size: int


def root_of(array: Any) -> Any:
    """The array that owns the memory, or what does where that is no array: a memory map, or its bytes."""
    base = array.base
    while base is not None:
        array, base = base, _beneath(base)
    return array


def _beneath(thing: Any) -> Any:
    """What keeps the memory of a thing; None if it does itself."""
    return thing.obj if type(thing) is memoryview else getattr(thing, "base", None)


def memory_of(array: Any) -> Memory:
    """The memory of an array of NumPy or CuPy."""
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
    """Where the memory of an array begins."""
    if isinstance(array, np.ndarray):
        return int(np.ndarray.__array_interface__.__get__(_last_array(array))["data"][0])
    return int(_pointer(root_of(array)).mem.ptr)


def _last_array(array: Any) -> Any:
    """The array around memory that is no array's."""
    while isinstance(base := _beneath(array), np.ndarray):
        array = base
    return array


def _size(holder: Any, array: Any) -> int:
    """Bytes of what is no array; of the array around it, if it does not say."""
    try:
        return memoryview(holder).nbytes
    except TypeError:
        return int(_last_array(array).nbytes)


def _pointer(array: Any) -> Any:
    """Of CuPy's array; a watched one's own `data` counts as an escape."""
    library: Any = getattr(type(array), "plain_class", type(array))
    return library.data.__get__(array)


def device_of(array: Any) -> int:
    """Index of its device; 0 for NumPy's."""
    return 0 if isinstance(array, np.ndarray) else int(array.device.id)
