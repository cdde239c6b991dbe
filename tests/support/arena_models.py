"""RMM's arena and bins as their sources tell them; see `allocator_models`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from allocator_models import Driver, RmmPoolModel, up

SUPERBLOCK = 1 << 20


@dataclass
class Superblock:
    """Its free blocks are (address, size), in order of address."""

    address: int
    size: int
    free: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = [(self.address, self.size)]

    def is_empty(self) -> bool:
        return self.free == [(self.address, self.size)]

    def fits(self, size: int) -> bool:
        return any(one[1] >= size for one in self.free)

    def first_fit(self, size: int) -> int:
        at = next(k for k, one in enumerate(self.free) if one[1] >= size)
        address, bytes_ = self.free.pop(at)
        if bytes_ > size:
            self.free.insert(at, (address + size, bytes_ - size))
        return address

    def coalesce(self, address: int, size: int) -> None:
        self.free = merged(sorted([*self.free, (address, size)]))


def merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for address, size in ranges:
        if result and sum(result[-1]) == address:
            result[-1] = (result[-1][0], result[-1][1] + size)
        else:
            result.append((address, size))
    return result


class RmmArenaModel:
    """`arena_memory_resource`: a global arena and one for each stream, each a list of superblocks."""

    def __init__(self, driver: Driver, size: int) -> None:
        address = driver.malloc(size)
        self.broken = address is None
        self.shared = [] if address is None else [Superblock(address, size)]
        self.streams: dict[int, list[Superblock]] = {}
        self.used: dict[int, int] = {}

    def allocate(self, size: int, stream: int) -> tuple[int, int] | None:
        if self.broken:
            return None
        size = up(size, 256)
        address = self.allocate_from(stream, size)
        if address is None:
            for superblocks in self.streams.values():
                while superblocks:
                    self.release(superblocks.pop(0))
            address = self.allocate_from(stream, size)
        if address is None:
            return None
        self.used[address] = size
        return address, size

    def allocate_from(self, stream: int, size: int) -> int | None:
        mine = self.streams.setdefault(stream, [])
        if size > SUPERBLOCK:
            superblock = self.acquire(size)
            if superblock is None:
                return None
            self.shared.append(superblock)
            return superblock.first_fit(size)
        for superblock in sorted(mine, key=lambda one: one.address):
            if superblock.fits(size):
                return superblock.first_fit(size)
        superblock = self.acquire(size)
        if superblock is None:
            return None
        mine.append(superblock)
        return superblock.first_fit(size)

    def acquire(self, size: int) -> Superblock | None:
        """Out of the global arena, cut to size if it may be cut."""
        for superblock in sorted(self.shared, key=lambda one: one.address):
            if superblock.fits(size):
                self.shared.remove(superblock)
                least = max(SUPERBLOCK, size)
                if superblock.is_empty() and superblock.size >= least + SUPERBLOCK:
                    self.shared.append(Superblock(superblock.address + least, superblock.size - least))
                    return Superblock(superblock.address, least)
                return superblock
        return None

    def release(self, superblock: Superblock) -> None:
        """Into the global arena, with empty ones that touch it if it is empty too."""
        if superblock.is_empty():
            for other in list(self.shared):
                if other.is_empty() and other.address + other.size == superblock.address:
                    self.shared.remove(other)
                    superblock = Superblock(other.address, other.size + superblock.size)
            for other in list(self.shared):
                if other.is_empty() and superblock.address + superblock.size == other.address:
                    self.shared.remove(other)
                    superblock = Superblock(superblock.address, superblock.size + other.size)
        self.shared.append(superblock)

    def free(self, address: int, stream: int) -> None:
        size = self.used.pop(address)
        for superblocks in [*self.streams.values(), self.shared]:
            for superblock in superblocks:
                if superblock.address <= address < superblock.address + superblock.size:
                    superblock.coalesce(address, size)
                    if superblocks is self.shared and superblock.is_empty():
                        self.shared.remove(superblock)
                        self.release(superblock)
                    return


class RmmBinningModel:
    """`binning_memory_resource` over the pool: queues of blocks by bin and stream."""

    def __init__(self, driver: Driver, bins: list[int], blocks: int, initial: int) -> None:
        self.pool = RmmPoolModel(driver, initial, None)
        self.blocks = blocks
        self.queues: dict[int, dict[int, deque[int]]] = {size: {} for size in bins}
        self.used: dict[int, int] = {}  # address -> bin, 0 for the pool's
        self.broken = self.pool.broken or not all(self.expand(size, 0) for size in bins)

    def expand(self, size: int, stream: int) -> bool:
        given = self.pool.allocate(size * self.blocks, stream)
        if given is None:
            return False
        queue = self.queues[size].setdefault(stream, deque())
        queue.extend(range(given[0], given[0] + size * self.blocks, size))
        return True

    def allocate(self, size: int, stream: int) -> tuple[int, int] | None:
        if self.broken:
            return None
        bin_ = next((one for one in self.queues if one >= size), 0)
        if bin_ == 0:
            given = self.pool.allocate(size, stream)
            if given is not None:
                self.used[given[0]] = 0
            return given
        queues = self.queues[bin_]
        mine = queues.setdefault(stream, deque())
        if not any(queues.values()) and not self.expand(bin_, stream):
            return None
        address = next(queue for queue in [mine, *queues.values()] if queue).popleft()
        self.used[address] = bin_
        return address, bin_

    def free(self, address: int, stream: int) -> None:
        bin_ = self.used.pop(address)
        if bin_ == 0:
            self.pool.free(address, stream)
        else:
            self.queues[bin_].setdefault(stream, deque()).append(address)
