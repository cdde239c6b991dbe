"""Memory of this process alone, unseen by any allocator, populated page by page when touched."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from mempool.errors import UsageError
from mempool.torch.offload.free_list import pages

if TYPE_CHECKING:
    from mempool.torch.offload.free_list import Holes

#: Flag for mappings that do not count as committed memory. The kernel merges neighbouring counted mappings,
#: and no process with one larger than all memory may fork: a few arenas of half the memory would be enough.
#: Python names the flag from 3.13 on.
_UNCOUNTED = getattr(mmap, "MAP_NORESERVE", 0x4000 if os.uname().machine in ("x86_64", "aarch64") else 0)
#: Granularity for counting and releasing pages, bytes.
PIECE = 1 << 20
#: Smallest excess that is released, bytes: less is not worth the page faults on the next use.
_LEAST = 64 << 20


class PrivateMemory:
    """Addresses for ``size`` bytes, in whole pages; a forked child gets a copy.

    Attributes:
        size: bytes.
        address: address of the first byte.

    Raises:
        UsageError: the system has no address range of that size.
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
        """Record that `size` bytes at offset `at` are about to be written."""
        self._touched[at // PIECE : -(-(at + size) // PIECE)] = True

    @property
    def touched_bytes(self) -> int:
        """Return an upper bound of the bytes in physical memory."""
        return int(self._touched.sum()) * PIECE

    def keep(self, needed: int, holes: Holes) -> None:
        """Release pages in holes to the system, if far more bytes were touched than are needed."""
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
        """Exclude the memory from forked children: pages must not turn copy-on-write while a GPU copies."""
        self._map.madvise(mmap.MADV_DONTFORK)
