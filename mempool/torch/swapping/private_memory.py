"""Memory of this process alone, which no allocator sees, page by page as it is touched."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from mempool.errors import UsageError
from mempool.torch.swapping.holes import pages

if TYPE_CHECKING:
    from mempool.torch.swapping.holes import Holes

#: The kernel joins neighbouring mappings that it counts as promised memory, and lets no process fork that has
#: one larger than all memory: a few arenas of half of it would do. Python names the flag from 3.13 on.
_UNCOUNTED = getattr(mmap, "MAP_NORESERVE", 0x4000 if os.uname().machine in ("x86_64", "aarch64") else 0)
#: Pages are counted and given back in pieces of so many bytes.
PIECE = 1 << 20
#: Less than this is not worth the faults of its pages when they are wanted again.
_LEAST = 64 << 20


class PrivateMemory:
    """Addresses for ``size`` bytes, in whole pages; a forked child has a copy of its own.

    Attributes:
        size: bytes.
        address: of the first one.

    Raises:
        UsageError: the system has no room for so many addresses.
    """

    def __init__(self, size: int) -> None:
        self.size = pages(max(size, 1))
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNCOUNTED
            self._map = mmap.mmap(-1, self.size, flags=flags)
        except (OSError, OverflowError, ValueError) as error:
            raise UsageError(f"the host has no {size:,} bytes for copies: {error}") from None
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._touched = np.zeros(-(-self.size // PIECE), np.bool_)

    def touch(self, at: int, size: int) -> None:
        """So many bytes at this place are about to be written."""
        self._touched[at // PIECE : -(-(at + size) // PIECE)] = True

    @property
    def touched_bytes(self) -> int:
        """Most that can be in memory."""
        return int(self._touched.sum()) * PIECE

    def keep(self, needed: int, holes: Holes) -> None:
        """Give pages in holes back to the system, if much more was touched than the bytes that are needed."""
        excess = self.touched_bytes - needed - needed // 4
        if excess < _LEAST:
            return
        for begin, end in reversed(holes.free()):
            for piece in range(end // PIECE - 1, -(-begin // PIECE) - 1, -1):
                if excess < PIECE:
                    return
                if self._touched[piece]:
                    self._map.madvise(mmap.MADV_DONTNEED, piece * PIECE, PIECE)
                    self._touched[piece] = False
                    excess -= PIECE

    def to_no_child(self) -> None:
        """A forked child has none of it: while a GPU copies, its pages must not come to be copied."""
        self._map.madvise(mmap.MADV_DONTFORK)
