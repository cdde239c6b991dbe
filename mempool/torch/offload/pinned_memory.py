"""Page-locked host memory for a GPU's copies, and an arena of it that grows only when necessary."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from typing import Any

import torch

from mempool._core import FreeList
from mempool.cuda import DRIVER
from mempool.torch.offload.host_memory import PAGE, PrivateMemory, pages
from mempool.torch.offload.options import OPTIONS

#: Flags CU_MEMHOSTREGISTER_PORTABLE and CU_MEMHOSTREGISTER_DEVICEMAP: for all contexts, and for kernels.
_LOCKED_FLAGS = 1 | 2


class PinnedMemory:
    """Host memory that is page-locked from the beginning on, as far as requested.

    CUDA's own host allocator rounds sizes up to powers of two; these sizes are exact. Memory is locked
    through the driver: an error in CUDA's runtime would be raised again by the program's next kernel.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory, self._device = PrivateMemory(size), device
        self._memory.exclude_from_forks()
        self._driver = ctypes.CDLL(DRIVER)
        self._parts: list[int] = []

    def lock(self, at: int, size: int) -> bool:
        """Lock these bytes, in whole pages; return False if the driver refuses."""
        address = self._memory.address + at
        with torch.cuda.device(self._device):
            torch.cuda.mem_get_info()  # makes the device's context current in this thread
            done = self._driver.cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(size), _LOCKED_FLAGS
            )
        if done == 0:
            self._parts.append(address)
        return bool(done == 0)

    @property
    def address(self) -> int:
        """Return the address of the first byte."""
        return self._memory.address

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


class PinnedArena:
    """Consecutive parts, each locked at once; a copy lies within a single part.

    Attributes:
        used: bytes taken.
        locked: bytes that are page-locked.
    """

    def __init__(self, memory: Any, size: int) -> None:
        """Create an arena of `size` bytes of a memory such as `PinnedMemory`."""
        self._memory, self._size = memory, size // PAGE * PAGE
        self._begins: list[int] = []
        self._parts: list[FreeList] = []
        self.locked = 0

    @property
    def address(self) -> int:
        """Return the address of the first byte."""
        return int(self._memory.address)

    @property
    def used(self) -> int:
        """Return the bytes taken."""
        return sum(part.used for part in self._parts)

    def allocate(self, size: int) -> int | None:
        """Take `size` locked bytes and return their offset; None if no free range is large enough."""
        for begin, part in zip(self._begins, self._parts, strict=True):
            if (at := part.allocate(size)) is not None:
                return begin + at
        return None

    def allocate_last(self, size: int) -> int | None:
        """Take `size` locked bytes as far back as possible; see `take`."""
        for begin, part in zip(reversed(self._begins), reversed(self._parts), strict=True):
            if (at := part.allocate_last(size)) is not None:
                return begin + at
        return None

    def allocate_at(self, at: int, size: int) -> bool:
        """Take `size` bytes from page `at` on; return False if some are taken, or no part has them all."""
        part = bisect_right(self._begins, at) - 1
        return part >= 0 and self._parts[part].allocate_at(at - self._begins[part], size)

    def grow(self, size: int) -> bool:
        """Lock more memory for a copy of `size` bytes; return False if the arena is full or CUDA refuses."""
        needed, left = pages(size), self._size - self.locked
        for more in (min(max(needed, OPTIONS.pinned_step_bytes, self.locked // 2), left), needed):
            more = more // PAGE * PAGE
            if needed <= more <= left and self._memory.lock(self.locked, more):
                self._begins.append(self.locked)
                self._parts.append(FreeList(more))
                self.locked += more
                return True
        return False

    def release(self, at: int, size: int) -> None:
        """Free bytes taken before."""
        part = bisect_right(self._begins, at) - 1
        self._parts[part].release(at - self._begins[part], size)

    def close(self) -> None:
        """Unlock the whole arena."""
        self._memory.close()
