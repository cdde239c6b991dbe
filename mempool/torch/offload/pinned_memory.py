"""Page-locked host memory for a GPU's copies, and an arena that grows and shrinks on demand."""

from __future__ import annotations

import ctypes
import resource
from bisect import bisect_right
from typing import Any

import torch

from mempool._core import FreeList
from mempool.cuda import DRIVER
from mempool.logs import log
from mempool.torch.offload.host_memory import PAGE, PrivateMemory, available_bytes, pages
from mempool.torch.offload.options import OPTIONS
from mempool.units import sized

#: Flags CU_MEMHOSTREGISTER_PORTABLE and CU_MEMHOSTREGISTER_DEVICEMAP: for all contexts, and for kernels.
_LOCKED_FLAGS = 1 | 2


class PinnedMemory:
    """Range of host memory that can be page-locked in parts.

    CUDA's own host allocator rounds sizes up to powers of two; these sizes are exact. Memory is locked
    through the driver, since an error of CUDA's runtime would be raised again by the program's next kernel.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory, self._device = PrivateMemory(size), device
        self._memory.exclude_from_forks()
        self._driver = ctypes.CDLL(DRIVER)
        self._parts: dict[int, int] = {}  # locked bytes by offset

    def lock(self, at: int, size: int) -> bool:
        """Lock these bytes, in whole pages; return False if the driver refuses."""
        with torch.cuda.device(self._device):
            torch.cuda.mem_get_info()  # makes the device's context current in this thread
            done = self._driver.cuMemHostRegister_v2(
                ctypes.c_void_p(self.address + at), ctypes.c_size_t(size), _LOCKED_FLAGS
            )
        if done == 0:
            self._parts[at] = size
        return bool(done == 0)

    def release(self, at: int, size: int) -> None:
        """Release the pages of a part, locked or not, to the system; no copy may be under way."""
        if self._parts.pop(at, 0):
            with torch.cuda.device(self._device):
                self._driver.cuMemHostUnregister(ctypes.c_void_p(self.address + at))
        self._memory.release(at, size)

    @property
    def address(self) -> int:
        """Return the address of the first byte."""
        return self._memory.address

    def data(self, at: int, size: int) -> torch.Tensor:
        """Return bytes as uint8[size]."""
        memory = (ctypes.c_ubyte * size).from_address(self._memory.address + at)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Release all pages to the system; no copy may be under way."""
        for at, size in list(self._parts.items()):
            self.release(at, size)
        self._memory.release(0, self._memory.size)


class PinnedArena:
    """Arena of adjacent parts, each locked by one call; a copy is within a single part.

    After CUDA refused to lock memory, further parts are pageable, which only makes copies slower.

    Attributes:
        size: bytes of all parts.
    """

    def __init__(self, memory: Any, most: int) -> None:
        """Create an arena of at most `most` bytes in a memory such as `PinnedMemory`."""
        self._memory, self._most = memory, most // PAGE * PAGE
        self._begins: list[int] = []
        self._parts: list[FreeList] = []
        self._idle: list[int] = []  # iterations since the last use of each part
        self._is_pageable = False
        self.size = 0

    @property
    def address(self) -> int:
        """Return the address of the first byte."""
        return int(self._memory.address)

    @property
    def used(self) -> int:
        """Return the allocated bytes."""
        return sum(part.used for part in self._parts)

    def allocate(self, size: int) -> int | None:
        """Allocate `size` bytes and return their offset; None if no free range suffices."""
        for begin, part in zip(self._begins, self._parts, strict=True):
            if (at := part.allocate(size)) is not None:
                return begin + at
        return None

    def allocate_last(self, size: int) -> int | None:
        """Allocate `size` bytes at the highest offset; return the offset or None, as `allocate`."""
        for begin, part in zip(reversed(self._begins), reversed(self._parts), strict=True):
            if (at := part.allocate_last(size)) is not None:
                return begin + at
        return None

    def allocate_at(self, at: int, size: int) -> bool:
        """Allocate `size` bytes at offset `at`; return False if not free, or not within one part."""
        part = bisect_right(self._begins, at) - 1
        return part >= 0 and self._parts[part].allocate_at(at - self._begins[part], size)

    def grow(self, size: int) -> bool:
        """Add a part for a copy of `size` bytes; return False if the arena is full."""
        needed, left = pages(size), self._most - self.size
        if needed > left:
            return False
        more = min(max(needed, OPTIONS.pinned_step_bytes, pages(self.size // 2)), left)
        if not (self._lock(more) or self._lock(needed)):
            self.note_refusal(needed)
            self._add(min(max(needed, OPTIONS.pinned_step_bytes), left))
        return True

    def join(self, size: int) -> bool:
        """Lock adjacent unused parts anew as one part for `size` bytes, past the present end if necessary.

        Return False if there are no such parts. No copy may be under way.
        """
        needed, count = pages(size), len(self._parts)
        for first, begin in enumerate(self._begins):
            end, last = begin, first
            while last < count and end - begin < needed and not self._parts[last].used:
                end, last = end + self._parts[last].size, last + 1
            if last == count and last > first:
                end = max(end, min(begin + needed, self._most))
            if end - begin < needed:
                continue
            for row in range(first, last):
                self._memory.release(self._begins[row], self._parts[row].size)
            if self._is_pageable or not self._memory.lock(begin, end - begin):
                self.note_refusal(end - begin)
            self._begins[first:last], self._idle[first:last] = [begin], [0]
            self._parts[first:last] = [FreeList(end - begin)]
            self.size = max(self.size, end)
            return True
        return False

    def reserve(self, size: int) -> None:
        """Lock memory in advance until the arena has `size` bytes, in as few parts as CUDA permits."""
        more = missing = min(pages(size), self._most) - self.size
        while missing > 0 and more >= PAGE and not self._is_pageable:
            if self._lock(more):
                missing -= more
                more = min(more, missing)
            elif more > OPTIONS.pinned_step_bytes:
                more = pages(more // 2)
            else:
                self.note_refusal(more)

    def _lock(self, size: int) -> bool:
        if self._is_pageable or not self._memory.lock(self.size, size):
            return False
        self._add(size)
        return True

    def _add(self, size: int) -> None:
        self._begins.append(self.size)
        self._parts.append(FreeList(size))
        self._idle.append(0)
        self.size += size

    def note_refusal(self, size: int) -> None:
        """Record CUDA's refusal to lock `size` more bytes; warn the first time."""
        if not self._is_pageable:
            warn_of_refused_lock(size, self.size)
        self._is_pageable = True

    def end_iteration(self) -> bool:
        """Count the iterations without a copy in each part; return whether `release_idle` has work."""
        for row, part in enumerate(self._parts):
            self._idle[row] = 0 if part.take_peak() else self._idle[row] + 1
        return bool(self._idle) and self._idle[-1] >= OPTIONS.pinned_idle_iterations

    def release_idle(self) -> None:
        """Release long idle parts at the end to the system; no copy may be under way."""
        while self._idle and self._idle[-1] >= OPTIONS.pinned_idle_iterations:
            self._idle.pop()
            begin, part = self._begins.pop(), self._parts.pop()
            self._memory.release(begin, part.size)
            self.size = begin

    def release(self, at: int, size: int) -> None:
        """Free allocated bytes."""
        part = bisect_right(self._begins, at) - 1
        self._parts[part].release(at - self._begins[part], size)

    def close(self) -> None:
        """Return the whole arena to the system."""
        self._memory.close()


def warn_of_refused_lock(size: int, locked: int) -> None:
    """Warn that CUDA refused to lock `size` more bytes of host memory, with `locked` bytes locked."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if allowed == resource.RLIM_INFINITY or locked > allowed:  # not because of the limit
        remedy = f"{sized(available_bytes())} of the host's memory are free"
    else:
        remedy = f"`ulimit -l` allows {sized(allowed)}; raise it, in a container by --ulimit memlock=-1"
    log.warning(
        "CUDA page-locks no %s of the host's memory beside %s: tensors go to pageable memory, which takes "
        "longer. %s",
        sized(size),
        sized(locked),
        remedy,
    )
