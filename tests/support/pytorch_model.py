"""Slow model of PyTorch's caching allocator: lists that are searched from end to end."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1 << 20
PAGE = 2 * MIB


@dataclass
class Block:
    """A block of a segment; not mapped if an expandable segment has no memory there."""

    address: int
    size: int
    used: bool = False
    mapped: bool = True
    since: int = 0


@dataclass
class Segment:
    """A segment with blocks by address."""

    stream: int
    small: bool
    blocks: list[Block]
    expandable: bool = False

    @property
    def end(self) -> int:
        return self.blocks[-1].address + self.blocks[-1].size


@dataclass
class Model:
    """The allocator; `allocate` returns an address or None, sizes are in bytes."""

    limit: int
    max_split: int = 1 << 62
    rounding: int = 20 * MIB
    large: int = 20 * MIB
    threshold: float = 0.0
    divisions: tuple[int, ...] = (0,) * 16
    expandable: bool = False
    segments: list[Segment] = field(default_factory=list)
    searches: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})

    @property
    def reserved(self) -> int:
        return sum(b.size for s in self.segments for b in s.blocks if b.mapped)

    @property
    def live(self) -> int:
        return sum(b.size for s in self.segments for b in s.blocks if b.used)

    def rounded(self, size: int) -> int:
        if size < 512:
            return 512
        parts = self.divisions[min(max(size.bit_length() - 21, 0), 15)]
        if not parts or size <= 512 * parts:
            return -(-size // 512) * 512
        power = 1 << (size.bit_length() - 1)
        if parts == 1 or power == size:
            return size
        steps = [power + power * k // parts for k in range(1, parts + 1)]
        return min(step for step in steps if step >= size)

    def allocate(self, size: int, stream: int) -> int | None:
        size = self.rounded(size)
        small = size <= MIB
        found = self._find(size, stream, small)
        if found is None:
            self._collect()
            found = self._obtain(size, stream, small)
        if found is None and self._release_available(size, stream, small):
            found = self._obtain(size, stream, small)
        if found is None:
            self._release_all()
            found = self._obtain(size, stream, small)
        if found is None:
            return None
        segment, block = found
        rest = block.size - size
        always = small or self.expandable
        if (always and rest >= 512) or (not always and size < self.max_split and rest > MIB):
            upper = Block(block.address + size, rest, since=self.searches[small])
            segment.blocks.insert(segment.blocks.index(block) + 1, upper)
            block.size = size
        block.used = True
        return block.address

    def free(self, address: int) -> None:
        for segment in self.segments:
            for block in segment.blocks:
                if block.used and block.address == address:
                    block.used = False
                    block.since = self.searches[segment.small]
                    self._merge(segment, block)
                    return
        raise AssertionError("nothing to free")

    def _merge(self, segment: Segment, block: Block) -> None:
        merged: list[Block] = []
        for other in segment.blocks:
            last = merged[-1] if merged else None
            if (
                last
                and block in (last, other)
                and not (last.used or other.used)
                and last.mapped == other.mapped
            ):
                block.address, block.size = last.address, last.size + other.size
                merged[-1] = block
            else:
                merged.append(other)
        segment.blocks = merged

    def _free(self, stream: int | None, small: bool) -> list[tuple[int, int, Segment, Block]]:
        """Return free blocks in search order: by size, then by address."""
        return sorted(
            (
                (block.size, block.address, segment, block)
                for segment in self.segments
                for block in segment.blocks
                if segment.small == small and stream in (None, segment.stream)
                if not block.used and block.mapped
            ),
            key=lambda row: (row[2].stream, *row[:2]),
        )

    def _find(self, size: int, stream: int, small: bool) -> tuple[Segment, Block] | None:
        if self.threshold and not self.expandable:
            self.searches[small] += 1
        fits = [row for row in self._free(stream, small) if row[0] >= size]
        if not fits:
            return None
        at = 0
        if self.expandable:
            while at + 1 < len(fits) and self._room(*fits[at + 1][2:]) < self._room(*fits[at][2:]):
                at += 1
        has, _, segment, block = fits[at]
        if size < self.max_split <= has or (size >= self.max_split and has >= size + self.rounding):
            return None
        return segment, block

    def _room(self, segment: Segment, block: Block) -> int:
        after = segment.blocks.index(block) + 1
        last = after == len(segment.blocks) or segment.blocks[after].mapped
        return block.size + (0 if last else segment.blocks[after].size)

    def _obtain(self, size: int, stream: int, small: bool) -> tuple[Segment, Block] | None:
        if self.expandable:
            return self._expand(size, stream, small)
        bytes_ = 2 * MIB if small else self.large if size < 10 * MIB else -(-size // PAGE) * PAGE
        if self.reserved + bytes_ > self.limit:
            return None
        block = Block(self._place(bytes_), bytes_)
        self.segments.append(Segment(stream, small, [block]))
        return self.segments[-1], block

    def _place(self, size: int) -> int:
        taken = sorted((s.blocks[0].address, -(-s.end // PAGE) * PAGE) for s in self.segments)
        at = PAGE
        for begin, end in taken:
            if at + size <= begin:
                break
            at = max(at, end)
        return at

    def _expand(self, size: int, stream: int, small: bool) -> tuple[Segment, Block] | None:
        unit = 2 * MIB if small else self.large
        options = []
        for segment in self.segments:
            if (segment.stream, segment.small) != (stream, small):
                continue
            for at, block in enumerate(segment.blocks):
                if not block.mapped:
                    begin = at - 1 if at and not segment.blocks[at - 1].used else at
                    options.append((block.address, segment, begin))
        for _, segment, begin in sorted(options, key=lambda option: option[0]):
            free = 0
            for block in segment.blocks[begin:]:
                if block.used or free >= size:
                    break
                free += block.size
            if free >= size:
                return self._grow(segment, begin, size, unit)
        bytes_ = -(-(self.limit + self.limit // 8) // unit) * unit
        if not bytes_:
            return None
        segment = Segment(stream, small, [Block(0, bytes_, mapped=False)], expandable=True)
        segment.blocks[0].address = self._place(bytes_)
        self.segments.append(segment)
        return self._grow(segment, 0, size, unit) if bytes_ >= size else None

    def _grow(self, segment: Segment, at: int, size: int, unit: int) -> tuple[Segment, Block] | None:
        """Map memory from block `at` on until the block is large enough."""
        while True:
            block = segment.blocks[at]
            if block.mapped and block.size >= size:
                return segment, block
            hole = segment.blocks[at + 1] if block.mapped else block
            want = min(size - (block.size if block.mapped else 0), hole.size)
            bytes_ = -(-want // unit) * unit
            if self.reserved + bytes_ > self.limit:
                return None
            where = segment.blocks.index(hole)
            if bytes_ < hole.size:
                upper = Block(hole.address + bytes_, hole.size - bytes_, mapped=False)
                segment.blocks.insert(where + 1, upper)
                hole.size = bytes_
            hole.mapped = True
            self._merge(segment, hole)
            at = segment.blocks.index(hole)

    def _collect(self) -> None:
        if not self.threshold or self.expandable:
            return
        excess = self.reserved - int(self.threshold * self.limit)
        while excess > 0:
            whole = [(s, b) for _, _, s, b in self._free(None, small=False) if len(s.blocks) == 1]
            if not whole:
                return
            ages = [self.searches[False] - b.since for _, b in whole]
            old = sum(ages) / len(ages)
            for (segment, block), age in zip(whole, ages, strict=True):
                if age >= old:
                    excess -= block.size
                    self._drop(segment)

    def _release_available(self, size: int, stream: int, small: bool) -> bool:
        if self.expandable or self.max_split == 1 << 62:
            return False
        need = max(size, self.max_split)
        free = self._free(stream, small)
        if fits := [row for row in free if row[0] >= need]:
            self._drop(fits[0][2])
            return True
        released = 0
        for has, _, segment, _ in reversed(free):
            if has < self.max_split or released >= need:
                break
            released += has
            self._drop(segment)
        return released >= need

    def _release_all(self) -> None:
        if not self.expandable:
            for segment in [s for s in self.segments if len(s.blocks) == 1 and not s.blocks[0].used]:
                self._drop(segment)
            return
        for segment in list(self.segments):
            unit = 2 * MIB if segment.small else self.large
            base = segment.blocks[0].address
            for block in [b for b in segment.blocks if b.mapped and not b.used]:
                begin = base + -(-(block.address - base) // unit) * unit
                end = base + (block.address + block.size - base) // unit * unit
                if begin >= end:
                    continue
                at = segment.blocks.index(block)
                hole = Block(begin, end - begin, mapped=False)
                parts = [
                    Block(block.address, begin - block.address),
                    hole,
                    Block(end, block.address + block.size - end),
                ]
                segment.blocks[at : at + 1] = [part for part in parts if part.size]
                self._merge(segment, hole)
                if not any(block.mapped for block in segment.blocks):
                    self._drop(segment)

    def _drop(self, segment: Segment) -> None:
        self.segments = [other for other in self.segments if other is not segment]
