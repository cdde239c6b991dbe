"""The arena of page-locked memory, which grows when it must: locking takes a while."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from mempool.torch.swapping.holes import PAGE, Holes, pages

if TYPE_CHECKING:
    import torch

#: Less is not locked at a time.
_LEAST = 64 << 20


class LockedArena:
    """Parts one after the other, each locked at once: a copy lies within one of them.

    Attributes:
        used: bytes that are taken.
        locked: bytes that are page-locked.
    """

    def __init__(self, memory: Any, size: int) -> None:
        """Make an arena of so many bytes of a memory such as `cuda_runtime.Locked`."""
        self._memory, self._size = memory, size // PAGE * PAGE
        self._begins: list[int] = []
        self._parts: list[Holes] = []
        self.locked = 0

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return sum(part.used for part in self._parts)

    def take(self, size: int) -> int | None:
        """Where so many bytes are now taken, of what is locked; None: there is no such hole."""
        for begin, part in zip(self._begins, self._parts, strict=True):
            if (at := part.take(size)) is not None:
                return begin + at
        return None

    def take_last(self, size: int) -> int | None:
        """The same as far behind as it can be."""
        for begin, part in zip(reversed(self._begins), reversed(self._parts), strict=True):
            if (at := part.take_last(size)) is not None:
                return begin + at
        return None

    def take_at(self, at: int, size: int) -> bool:
        """Take so many bytes from this page on; False: some are taken, or no one part has them all."""
        part = bisect_right(self._begins, at) - 1
        return part >= 0 and self._parts[part].take_at(at - self._begins[part], size)

    def grow(self, size: int) -> bool:
        """Lock so much more that a copy of so many bytes finds room; False: it may not, or CUDA refuses."""
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
        """Free what `take` took."""
        part = bisect_right(self._begins, at) - 1
        self._parts[part].give(at - self._begins[part], size)

    def data(self, at: int, size: int) -> torch.Tensor:
        """Bytes that were taken, as uint8[size]."""
        return self._memory.data(at, size)

    def close(self) -> None:
        """Unlock all of it."""
        self._memory.close()
