"""Host memory for copies: default limit, and mappings outside all allocators."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mempool.errors import UsageError
from mempool.torch.offload.options import OPTIONS

if TYPE_CHECKING:
    from mempool._core import FreeList

#: Page size in bytes; copies occupy whole pages.
PAGE = 4096


def pages(size: int) -> int:
    """Round a size up to whole pages, in bytes."""
    return -(-size // PAGE) * PAGE


#: Flag MAP_NORESERVE for mappings that do not count as committed memory. The kernel merges adjacent counted
#: mappings, and refuses a fork with a mapping larger than all memory, such as of a few arenas of half the
#: memory. Python has a name for the flag since 3.13.
_UNCOUNTED = getattr(mmap, "MAP_NORESERVE", 0x4000 if os.uname().machine in ("x86_64", "aarch64") else 0)
PIECE = OPTIONS.host_page_piece_bytes


class PrivateMemory:
    """Private mapping of ``size`` bytes in whole pages; a forked child has a copy.

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

    def mark_touched(self, at: int, size: int) -> None:
        """Record that `size` bytes at offset `at` are about to be written."""
        self._touched[at // PIECE : -(-(at + size) // PIECE)] = True

    @property
    def touched_bytes(self) -> int:
        """Return an upper bound of the bytes in physical memory."""
        return int(self._touched.sum()) * PIECE

    def release_excess(self, needed: int, free_list: FreeList) -> None:
        """Release pages of free ranges to the system if far more bytes are touched than needed."""
        excess = self.touched_bytes - needed - needed // 4
        if excess < OPTIONS.host_release_bytes:
            return
        for begin, end in reversed(free_list.free_ranges()):
            for piece in range(end // PIECE - 1, -(-begin // PIECE) - 1, -1):
                if excess < PIECE:
                    return
                if self._touched[piece]:
                    self.release(piece * PIECE, PIECE)
                    self._touched[piece] = False
                    excess -= PIECE

    def release(self, at: int, size: int) -> None:
        """Release whole pages, with their contents, to the system."""
        self._map.madvise(mmap.MADV_DONTNEED, at, size)

    def exclude_from_forks(self) -> None:
        """Exclude the memory from forks, which would make pages copy-on-write while a GPU copies."""
        self._map.madvise(mmap.MADV_DONTFORK)


#: Files of a control group (limit, usage), and the key of reclaimable file pages in memory.stat.
_GROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def default_host_limit(root: Path = Path("/")) -> int:
    """Return half of the free host memory in bytes."""
    return available_bytes(root) // 2


def available_bytes(root: Path = Path("/")) -> int:
    """Return the host memory in bytes that the system and control groups permit this process to allocate.

    Args:
        root: root of the file system to read.
    """
    free = _counts(root / "proc/meminfo").get("MemAvailable")
    if free is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _groups(root):
        for limit, held, files in _GROUPS:
            most, now = _number(folder / limit), _number(folder / held)
            if most is not None and now is not None:
                free = min(free, most - now + _counts(folder / "memory.stat").get(files, 0))
    return max(free, 0)


def _groups(root: Path) -> list[Path]:
    """Return the folders of this process's control groups and their ancestors."""
    top = root / "sys/fs/cgroup"
    found = {top, top / "memory"}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers in ("", "memory"):
            folder = top / controllers / path.strip("/")
            found |= {folder, *(one for one in folder.parents if one.is_relative_to(top))}
    return sorted(found)


def _counts(path: Path) -> dict[str, int]:
    """Read numbers by name, in bytes: lines of ``name 12`` or ``name: 12 kB``."""
    rows = [line.replace(":", " ").split() for line in _lines(path)]
    return {
        row[0]: int(row[1]) << (10 if row[2:] == ["kB"] else 0)
        for row in rows
        if len(row) > 1 and row[1].isdigit()
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None
