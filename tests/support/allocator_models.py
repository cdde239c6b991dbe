"""Slow models of allocators after their sources: lists, searched from the beginning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from traces.trace import EventType, Trace


class Model(Protocol):
    """Interface of a model: `allocate` returns address and size of a block, or None."""

    def allocate(self, size: int, stream: int) -> tuple[int, int] | None: ...

    def free(self, address: int, stream: int) -> None: ...


@dataclass
class Driver:
    """Device that returns the lowest multiple of 2 MiB with enough free bytes, up to a limit."""

    limit: int
    held: dict[int, int] = field(default_factory=dict)  # address -> bytes
    page: int = 2 << 20

    @property
    def reserved(self) -> int:
        return sum(self.held.values())

    def malloc(self, size: int) -> int | None:
        if self.reserved + size > self.limit:
            return None
        address = self.page
        for start in sorted(self.held):
            if address + size <= start:
                break
            address = -(-(start + self.held[start]) // self.page) * self.page
        self.held[address] = size
        return address

    def free(self, address: int) -> None:
        del self.held[address]


def play(trace: Trace, driver: Driver, model: Model) -> tuple[list[int], list[int], list[int], int | None]:
    """Return address, live, reserved of each event, and the first failed alloc, as in a `Simulation`."""
    address, live, reserved = [], [], []
    blocks: dict[int, tuple[int, int]] = {}
    failed_at = None
    for event, (kind, buffer, size, stream) in enumerate(
        zip(
            *(column.tolist() for column in (trace.kind, trace.buffer, trace.size, trace.stream)), strict=True
        )
    ):
        address.append(-1)
        if kind == EventType.ALLOC and size > 0:
            if (given := model.allocate(size, stream)) is not None:
                blocks[buffer] = given
                address[-1] = given[0]
            elif failed_at is None:
                failed_at = event
        elif kind == EventType.FREE and buffer in blocks:
            model.free(blocks.pop(buffer)[0], stream)
        live.append(sum(block[1] for block in blocks.values()))
        reserved.append(driver.reserved)
    return address, live, reserved, failed_at


def up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@dataclass
class Piece:
    """A block of a segment that begins at `base`."""

    address: int
    size: int
    base: int
    stream: int = 0
    free: bool = False


def lowest(pieces: list[Piece]) -> Piece:
    return min(pieces, key=lambda piece: piece.address)


class Pieces:
    """All blocks of all segments in one list."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.pieces: list[Piece] = []

    def cut(self, piece: Piece, size: int) -> None:
        rest = Piece(piece.address + size, piece.size - size, piece.base, piece.stream, free=True)
        piece.size = size
        self.pieces.append(rest)

    def at(self, address: int) -> Piece:
        return next(piece for piece in self.pieces if piece.address == address)

    def merge_around(self, piece: Piece) -> None:
        """Merge a block with the adjacent free blocks of the segment."""
        for other in [
            other for other in self.pieces if other.free and other.base == piece.base and other is not piece
        ]:
            if other.address == piece.address + piece.size:
                piece.size += other.size
                self.pieces.remove(other)
            elif other.address + other.size == piece.address:
                piece.address, piece.size = other.address, piece.size + other.size
                self.pieces.remove(other)

    def whole(self) -> list[Piece]:
        return [
            other for other in self.pieces if other.free and other.size == self.driver.held.get(other.address)
        ]

    def give_back(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            self.pieces.remove(piece)
            self.driver.free(piece.address)


class CupyModel(Pieces):
    """`SingleDeviceMemoryPool`: see `solvers.simulators.pools`; `choose` picks among blocks of one size."""

    def __init__(
        self,
        driver: Driver,
        choose: Callable[[list[Piece]], Piece] = lowest,
    ) -> None:
        super().__init__(driver)
        self.choose = choose

    def allocate(self, size: int, stream: int) -> tuple[int, int] | None:
        size = up(size, 512)
        fitting = [
            other for other in self.pieces if other.free and other.stream == stream and other.size >= size
        ]
        if fitting:
            least = min(one.size for one in fitting)
            piece = self.choose([one for one in fitting if one.size == least])
            if piece.size > size:
                self.cut(piece, size)
        else:
            address = self.driver.malloc(size)
            if address is None:
                self.give_back(self.whole())
                address = self.driver.malloc(size)
            if address is None:
                return None
            piece = Piece(address, size, address, stream)
            self.pieces.append(piece)
        piece.free = False
        return piece.address, piece.size

    def free(self, address: int, stream: int) -> None:
        piece = self.at(address)
        piece.free = True
        self.merge_around(piece)


@dataclass
class Headed:
    """A block of RMM."""

    address: int
    size: int
    head: bool


def insert(blocks: list[Headed], block: Headed) -> None:
    """Insert a block in order of address; merge adjacent blocks unless the upper block is a head."""
    at = next((k for k, other in enumerate(blocks) if other.address > block.address), len(blocks))
    blocks.insert(at, block)
    for k in (at, at - 1):
        if 0 <= k < len(blocks) - 1:
            low, high = blocks[k : k + 2]
            if low.address + low.size == high.address and not high.head:
                low.size += high.size
                del blocks[k + 1]


def take_best(blocks: list[Headed], size: int) -> Headed | None:
    """Remove and return the smallest sufficient block, the first of its size."""
    best = None
    for block in blocks:
        if block.size >= size and (best is None or block.size < best.size):
            best = block
    if best is not None:
        blocks.remove(best)
    return best


class RmmPoolModel:
    """`pool_memory_resource` with its lists by stream, in order of their first appearance."""

    def __init__(self, driver: Driver, initial: int, maximum: int | None) -> None:
        self.driver, self.maximum = driver, maximum
        self.lists: dict[int, list[Headed]] = {}
        self.used: dict[int, Headed] = {}
        self.segments: dict[int, int] = {}
        self.broken = False
        if initial:
            block = self.try_to_expand(initial, initial)
            self.broken = block is None
            if block is not None:
                self.lists[0] = [block]

    def allocate(self, size: int, stream: int) -> tuple[int, int] | None:
        if self.broken:
            return None
        block = self.find(up(size, 256), stream)
        if block is None:
            return None
        self.used[block.address] = block
        return block.address, block.size

    def find(self, size: int, stream: int) -> Headed | None:
        mine = self.lists.setdefault(stream, [])
        others = [blocks for other, blocks in self.lists.items() if other != stream]
        for blocks in [mine, *others]:
            if (block := self.cut_from(blocks, size)) is not None:
                return block
        for blocks in others:
            for block in blocks:
                insert(mine, block)
            blocks.clear()
            if (found := self.cut_from(mine, size)) is not None:
                return found
        grow = self.size_to_grow(size)
        if grow < size:
            self.reclaim(size, mine)
            grow = self.size_to_grow(size)
        new = self.try_to_expand(grow, size)
        if new is None:
            return None
        insert(mine, new)
        return self.cut_from(mine, size)

    @staticmethod
    def cut_from(blocks: list[Headed], size: int) -> Headed | None:
        best = take_best(blocks, size)
        if best is not None and best.size > size:
            insert(blocks, Headed(best.address + size, best.size - size, head=False))
        return best and Headed(best.address, size, best.head)

    def size_to_grow(self, size: int) -> int:
        pool = sum(self.segments.values())
        if self.maximum is None:
            return max(size, pool)
        remaining = up(self.maximum - pool, 256)
        return max(size, remaining // 2) if size <= remaining else 0

    def try_to_expand(self, size: int, least: int) -> Headed | None:
        while size >= least:
            address = self.driver.malloc(size)
            if address is not None:
                self.segments[address] = size
                return Headed(address, size, head=True)
            if size == least:
                return None
            size = max(least, size // 2)
        return None

    def reclaim(self, size: int, mine: list[Headed]) -> None:
        assert self.maximum is not None
        if size > self.maximum:
            return
        for block in list(mine):
            if self.maximum - sum(self.segments.values()) >= size:
                return
            if block.head and self.segments.get(block.address) == block.size:
                mine.remove(block)
                del self.segments[block.address]
                self.driver.free(block.address)

    def free(self, address: int, stream: int) -> None:
        insert(self.lists.setdefault(stream, []), self.used.pop(address))
