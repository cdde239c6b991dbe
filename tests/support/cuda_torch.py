"""A PyTorch built for CUDA, as far as its allocator: what this one lacks, put in its place.

It keeps the addresses that it is given, and calls them by ctypes where PyTorch's C++ would. For a process
of its own.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch
from fake_cuda import FakeCuda

#: The setters of an allocator that PyTorch 2.3 and later have.
SETTERS = (
    "set_init_fn",
    "set_reset_fn",
    "set_memory_fraction_fn",
    "set_base_alloc_fn",
    "set_record_stream_fn",
    "set_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn",
    "set_release_pool",
)


class Allocator:
    """``torch._C._CUDAPluggableAllocator``."""

    def __init__(self, alloc: int, free: int, lacks: tuple[str, ...]) -> None:
        self.addresses = {"alloc": alloc, "free": free}
        for name in SETTERS:
            if name not in lacks:
                setattr(self, name, lambda address, name=name: self.addresses.update({name: address}))


class CudaTorch:
    """PyTorch, with a fake driver below it.

    Attributes:
        allocator: what is PyTorch's allocator now; None: its own.
        live: what is alive, address -> size.
    """

    def __init__(
        self, driver: str, *, sees: bool = True, in_use: bool = False, lacks: tuple[str, ...] = ()
    ) -> None:
        self.fake = FakeCuda(driver)  # type: ignore[arg-type]
        self.in_use = in_use  # by whatever has made its own allocator work already
        self.allocator: Allocator | None = None
        self.live: dict[int, int] = {}
        self._lock = threading.Lock()
        torch.version.cuda = "12.8"
        torch.backends.cuda.is_built = lambda: "everything" not in lacks
        torch.cuda.device_count = lambda: 2 if sees else 0
        torch.cuda.is_initialized = lambda: in_use
        if "everything" not in lacks:
            torch._C._cuda_customAllocator = lambda alloc, free: Allocator(alloc, free, lacks)
        torch._C._cuda_changeCurrentAllocator = self._change

    def _change(self, allocator: Allocator) -> None:
        if self.in_use:
            raise RuntimeError("Can't swap an already initialized allocator")
        self.allocator = allocator

    def _function(self, name: str, answer: Any, *arguments: Any, gil: bool = False) -> Any:
        kind = ctypes.PYFUNCTYPE if gil else ctypes.CFUNCTYPE
        assert self.allocator is not None, "PyTorch has its own allocator"
        return kind(answer, *arguments)(self.allocator.addresses[name])

    def see_devices(self, count: int) -> None:
        """PyTorch is in use, with so many devices."""
        for module in (torch.cuda, torch.cuda.memory):
            module.is_initialized = lambda: True
            module._lazy_init = lambda: None
        torch.cuda.device_count = lambda: count
        torch.cuda.current_device = lambda: 0

    @staticmethod
    def raises(*_: Any) -> None:
        """What PyTorch does where a plugged-in allocator cannot answer."""
        raise RuntimeError("CUDAPluggableAllocator does not yet support it")

    # --- tensors

    def alloc(self, size: int, *, device: int = 0, stream: int = 0, gil: bool = False) -> int:
        arguments = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        address: int = self._function("alloc", ctypes.c_void_p, *arguments, gil=gil)(size, device, stream)
        with self._lock:
            for other, length in self.live.items():
                assert address + size <= other or other + length <= address, "two live buffers overlap"
            self.live[address] = size
        return address

    def free(self, address: int, *, device: int = 0, stream: int = 0, gil: bool = False) -> None:
        with self._lock:
            size = self.live.pop(address)
        arguments = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        self._function("free", None, *arguments, gil=gil)(address, size, device, stream)

    def record_stream(self, address: int, stream: int) -> None:
        self._function("set_record_stream_fn", None, ctypes.c_void_p, ctypes.c_void_p)(address, stream)

    def empty_cache(self) -> None:
        self._function("set_reset_fn", None)()

    def set_memory_fraction(self, fraction: float, device: int = 0) -> None:
        self._function("set_memory_fraction_fn", None, ctypes.c_double, ctypes.c_int)(fraction, device)

    def base_of(self, address: int) -> tuple[int, int]:
        """The reservation that it lies in: address and bytes."""
        size = ctypes.c_size_t()
        arguments = ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)
        base = self._function("set_base_alloc_fn", ctypes.c_void_p, *arguments)(address, ctypes.byref(size))
        return base, size.value

    def release_pool(self, device: int, number: int) -> None:
        """A graph of this number is gone. A pair of integers by value goes as two of them."""
        arguments = ctypes.c_int, ctypes.c_ulonglong, ctypes.c_ulonglong
        self._function("set_release_pool", None, *arguments)(device, 0, number)

    def iteration(self, *, device: int = 0, stream: int = 0, gil: bool = False) -> None:
        """Forward and backward, as a training has it."""
        where: dict[str, Any] = {"device": device, "stream": stream, "gil": gil}
        kept = []
        for layer in range(10):
            kept.append(self.alloc(4096 * (layer % 3 + 1), **where))
            self.free(self.alloc(10_000 + 512 * layer, **where), **where)
        while kept:
            self.free(self.alloc(30_000, **where), **where)
            self.free(kept.pop(), **where)

    def alloc_as_pytorch(self, translated: str, size: int, device: int = 0) -> int:
        """With C++ exceptions as PyTorch translates them: see tests/native/torch_translated.cpp."""
        assert self.allocator is not None
        function = ctypes.PyDLL(translated).allocate
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        function.restype = ctypes.py_object
        address: int = function(self.allocator.addresses["alloc"], size, device, None)
        return address
