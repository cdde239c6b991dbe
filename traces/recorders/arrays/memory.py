"""Which memory an array lies in, and how long that lives."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Memory(NamedTuple):
    """The memory of an array and of all its views.

    Attributes:
        key: the same number for all arrays in this memory, while one of them is alive.
        root: what lives as long as the memory, or the last array on the way to it; has weak references.
        address: of its first byte.
        size: bytes.
    """

    key: int
    root: Any
    address: int
    size: int


def root_of(array: Any) -> Any:
    """The array that owns the memory, or what does where that is no array: a memory map, a memoryview."""
    base = array.base
    while base is not None:
        array, base = base, _beneath(base)
    return array


def _beneath(thing: Any) -> Any:
    """What keeps the memory of a thing; None if it does itself."""
    return thing.obj if type(thing) is memoryview else getattr(thing, "base", None)


def memory_of(array: Any) -> Memory:
    """The memory of an array of NumPy or CuPy."""
    return _on_host(array) if isinstance(array, np.ndarray) else _on_device(array)


def _on_host(array: Any) -> Memory:
    holder, last = array, array
    while (base := _beneath(holder)) is not None:
        holder = base
        last = base if isinstance(base, np.ndarray) else last
    address = np.ndarray.__array_interface__.__get__(last)["data"][0]
    root = holder if type(holder).__weakrefoffset__ else last
    return Memory(id(holder), root, address, last.nbytes if root is last else _size(holder, last))


def _size(holder: Any, last: Any) -> int:
    """Bytes of what is no array; of the array around it, if it does not say."""
    try:
        return memoryview(holder).nbytes
    except TypeError:
        return int(last.nbytes)


def _on_device(array: Any) -> Memory:
    root = root_of(array)
    # A watched array's own `data` counts as an escape.
    pointer = _class_of_library(type(root)).data.__get__(root)
    return Memory(id(pointer.mem), root, pointer.mem.ptr, pointer.mem.size)


def _class_of_library(kind: type) -> Any:
    return getattr(kind, "plain_class", kind)


def device_of(array: Any) -> int:
    """Index of its device; 0 for NumPy's."""
    return 0 if isinstance(array, np.ndarray) else int(array.device.id)
