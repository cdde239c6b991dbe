"""The parts of CUDA that the engine uses, by way of PyTorch; tests replace this module's `CudaRuntime`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from mempool.cuda import DRIVER
from mempool.torch.offload.private_memory import PrivateMemory

#: Flag CU_MEMHOSTREGISTER_PORTABLE.
_OF_ALL_CONTEXTS = 1


class CudaRuntime:
    """Streams, events, copies and page-locked memory of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Any:
        """Create a stream."""
        return torch.cuda.Stream(self._device)

    def current(self) -> Any:
        """Return the stream on which this thread's operations run now."""
        return torch.cuda.current_stream(self._device)

    def synchronize(self) -> None:
        """Wait until all streams have finished their work."""
        torch.cuda.synchronize(self._device)

    def capturing(self) -> bool:
        """Return whether this thread's work is captured into a graph instead of executed."""
        return bool(torch.cuda.is_current_stream_capturing())

    def event(self, stream: Any, *, timing: bool = False) -> Any:
        """Return an event recorded after the stream's work so far."""
        event = torch.cuda.Event(enable_timing=timing)
        event.record(stream)
        return event

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy on a stream; the host's side is page-locked."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def data(self, size: int) -> torch.Tensor:
        """Allocate device memory, uint8[size]."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def locked(self, size: int) -> Locked:
        """Reserve host addresses for `size` bytes, none of them page-locked yet."""
        return Locked(size, self._device)


class Locked:
    """Host memory that is page-locked from the beginning on, as far as requested.

    CUDA's own host allocator rounds sizes up to powers of two; these sizes are exact. Memory is locked
    through the driver: an error in CUDA's runtime would be raised again by the program's next kernel.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory, self._device = PrivateMemory(size), device
        self._memory.to_no_child()
        self._driver = ctypes.CDLL(DRIVER)
        self._parts: list[int] = []

    def lock(self, at: int, size: int) -> bool:
        """Lock these bytes, in whole pages; return False if the driver refuses."""
        address = self._memory.address + at
        with torch.cuda.device(self._device):
            torch.cuda.mem_get_info()  # makes the device's context current in this thread
            done = self._driver.cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(size), _OF_ALL_CONTEXTS
            )
        if done == 0:
            self._parts.append(address)
        return bool(done == 0)

    def data(self, at: int, size: int) -> torch.Tensor:
        """Return locked bytes as uint8[size]."""
        memory = (ctypes.c_ubyte * size).from_address(self._memory.address + at)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Unlock all memory; no copy may be under way."""
        with torch.cuda.device(self._device):
            for address in self._parts:
                self._driver.cuMemHostUnregister(ctypes.c_void_p(address))
        self._parts.clear()
