"""What of CUDA the engine uses, by way of PyTorch; for tests there is another."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from mempool.cuda import DRIVER
from mempool.torch.swapping.private_memory import PrivateMemory

#: CU_MEMHOSTREGISTER_PORTABLE
_OF_ALL_CONTEXTS = 1


class CudaRuntime:
    """Streams, events, copies and page-locked memory of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Any:
        """A stream of our own."""
        return torch.cuda.Stream(self._device)

    def current(self) -> Any:
        """The stream on which operations of this thread run now."""
        return torch.cuda.current_stream(self._device)

    def synchronize(self) -> None:
        """Wait until all streams are through with what they were asked for."""
        torch.cuda.synchronize(self._device)

    def capturing(self) -> bool:
        """Whether what this thread asks for goes into a graph, not to the device."""
        return bool(torch.cuda.is_current_stream_capturing())

    def event(self, stream: Any, *, timing: bool = False) -> Any:
        """When the stream is through with what it was asked for so far."""
        event = torch.cuda.Event(enable_timing=timing)
        event.record(stream)
        return event

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Ask a stream for a copy; the host's side is page-locked."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def data(self, size: int) -> torch.Tensor:
        """Memory of the device, uint8[size]."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def locked(self, size: int) -> Locked:
        """Addresses for so many bytes of the host, none of them locked yet."""
        return Locked(size, self._device)


class Locked:
    """Memory of the host that is page-locked from its beginning on, as far as was asked.

    CUDA's own host allocator rounds sizes up to powers of two; these are as long as was asked for. By the
    driver: what its runtime refuses would be raised again by the next kernel of the program.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory, self._device = PrivateMemory(size), device
        self._memory.to_no_child()
        self._driver = ctypes.CDLL(DRIVER)
        self._parts: list[int] = []

    def lock(self, at: int, size: int) -> bool:
        """Lock these bytes, whole pages; False: the driver refuses."""
        address = self._memory.address + at
        with torch.cuda.device(self._device):
            torch.cuda.mem_get_info()  # so that the device's context is this thread's
            done = self._driver.cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(size), _OF_ALL_CONTEXTS
            )
        if done == 0:
            self._parts.append(address)
        return bool(done == 0)

    def data(self, at: int, size: int) -> torch.Tensor:
        """Locked bytes as uint8[size]."""
        memory = (ctypes.c_ubyte * size).from_address(self._memory.address + at)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Unlock all; no copy is under way."""
        with torch.cuda.device(self._device):
            for address in self._parts:
                self._driver.cuMemHostUnregister(ctypes.c_void_p(address))
        self._parts.clear()
