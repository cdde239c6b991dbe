"""CuPy's devices without a GPU: the test sets the current device, and addresses are simulated or fake."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mempool import _core
from mempool.cupy import CupyPool, _install

_NAMES = {
    "current_device": b"int (int __pyx_skip_dispatch)",
    "current_stream": b"intptr_t (void)",
}


def capsule(address: int, name: bytes) -> Any:
    """Return a C function as Cython exports it; the caller keeps the name alive."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return make(address, name, None)


class Current:
    """The calling thread's current device and stream, kept in C."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.PyDLL(str(library))
        self._library.set_current.argtypes = (ctypes.c_int, ctypes.c_ssize_t)
        self._library.current_stream.restype = ctypes.c_ssize_t

    def capsules(self) -> tuple[Any, Any]:
        addresses = {
            name: ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value for name in _NAMES
        }
        device, stream = (capsule(addresses[name] or 0, text) for name, text in _NAMES.items())
        return device, stream

    def callables(self) -> tuple[Any, Any]:
        return lambda: self._library.current_device(0), self._library.current_stream

    def set(self, device: int = 0, stream: int = 0) -> None:
        self._library.set_current(device, stream)

    @contextlib.contextmanager
    def on(self, device: int = 0, stream: int = 0) -> Iterator[None]:
        before = self._library.current_device(0), self._library.current_stream()
        self.set(device, stream)
        try:
            yield
        finally:
            self.set(*before)


class FakePlatform:
    """A platform whose devices a function makes, with the current device kept in C or in Python."""

    def __init__(
        self, current: Current, device: Callable[[int], _core.Device], *, python: bool = False
    ) -> None:
        self.devices: dict[int, _core.Device] = {}
        self._current, self._device, self._python = current, device, python

    def check(self) -> None: ...

    def device(self, index: int) -> _core.Device:
        self.devices[index] = self._device(index)
        return self.devices[index]

    def current(self) -> tuple[Any, Any]:
        return self._current.callables() if self._python else self._current.capsules()


def install(platform: FakePlatform, **options: Any) -> CupyPool:
    """Install like `mempool.cupy.install` on this platform, without a planner thread."""
    return _install(platform, {"background": False, **options})


def make(platform: FakePlatform, **options: Any) -> CupyPool:
    """Make a pool without installing it."""
    return CupyPool(platform=platform, background=False, **options)
