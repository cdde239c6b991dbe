"""Arena of page-locked memory, which grows only when necessary: locking takes a while."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from mempool.torch.offload.free_list import PAGE, Holes, pages

if TYPE_CHECKING:
    import torch

#: Least number of bytes locked at a time.
_LEAST = 64 << 20


class LockedArena:
    """Consecutive parts, each locked at once; a copy lies within a single part.

    Attributes:
        used: bytes taken.
        locked: bytes that are page-locked.
    """

    def __init__(self, memory: Any, size: int) -> None:
        """Create an arena of `size` bytes of a memory such as `cuda_runtime.Locked`."""
        self._memory, self._size = memory, size // PAGE * PAGE
        self._begins: list[int] = []
        self._parts: list[Holes] = []
        self.locked = 0

    @property
    def used(self) -> int:
        """Return the bytes taken."""
        return sum(part.used for part in self._parts)

    def take(self, size: int) -> int | None:
        """Take `size` locked bytes and return their offset; None if no hole is large enough."""
        for begin, part in zip(self._begins, self._parts, strict=True):
            if (at := part.take(size)) is not None:
                return begin + at
        return None

    def take_last(self, size: int) -> int | None:
        """Take `size` locked bytes as far back as possible; see `take`."""
        for begin, part in zip(reversed(self._begins), reversed(self._parts), strict=True):
            if (at := part.take_last(size)) is not None:
                return begin + at
        return None

    def take_at(self, at: int, size: int) -> bool:
        """Take `size` bytes from page `at` on; return False if some are taken, or no part has them all."""
        part = bisect_right(self._begins, at) - 1
        return part >= 0 and self._parts[part].take_at(at - self._begins[part], size)

    def grow(self, size: int) -> bool:
        """Lock more memory for a copy of `size` bytes; return False if the arena is full or CUDA refuses."""
        needed, left = pages(size), self._size - self.locked
        for more in (min(max(needed, _LEAST, self.locked // 2), left), needed):
            more = more // PAGE * PAGE
            if needed <= more <= left and self._memory.lock(self.locked, more):
                self._begins.append(self.locked)
                self._parts.append(Holes(more))
                self.locked += more
                return True
        return False

    def give(self, at: int, size: int) -> None:
        """Free bytes taken before."""
        part = bisect_right(self._begins, at) - 1
        self._parts[part].give(at - self._begins[part], size)

    def data(self, at: int, size: int) -> torch.Tensor:
        """Return taken bytes as uint8[size]."""
        return self._memory.data(at, size)

    def close(self) -> None:
        """Unlock the whole arena."""
        self._memory.close()
