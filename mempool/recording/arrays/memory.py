"""The memory behind an array, and the object that keeps this memory alive."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


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
