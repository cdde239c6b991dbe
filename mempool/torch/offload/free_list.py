"""Free list of an arena: best fit, unless a place is planned."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

#: Page size, bytes: copies begin at a page and take whole pages.
PAGE = 4096


class Holes:
    """Free list of an arena of ``size`` bytes, a multiple of a page, sorted by place and by length.

    Attributes:
        size: bytes of the arena.
        used: bytes taken, in whole pages.
        most: high-water mark of `used` since the last call of `rested`.
    """

    def __init__(self, size: int) -> None:
        self.size, self.used, self.most = size, 0, 0
        self._starts = [0] if size else []
        self._lengths = {0: size} if size else {}
        self._by_length = [(size, 0)] if size else []

    def take(self, size: int) -> int | None:
        """Take `size` bytes, 1 or more, and return their offset; None if no hole is large enough."""
        needed = pages(size)
        place = bisect_left(self._by_length, (needed, -1))
        if place == len(self._by_length):
            return None
        at = self._by_length[place][1]
        length = self._lose(at)
        self._gain(at + needed, length - needed)
        self.used += needed
        self.most = max(self.most, self.used)
        return at

    def take_last(self, size: int) -> int | None:
        """Take bytes at the end of the last large enough hole, away from other places; see `take`."""
        needed = pages(size)
        for at in reversed(self._starts):
            if (length := self._lengths[at]) >= needed:
                begin = at + length - needed
                self.take_at(begin, size)
                return begin
        return None

    def take_at(self, at: int, size: int) -> bool:
        """Take `size` bytes, 1 or more, from page `at` on; return False if some of them are taken."""
        needed = pages(size)
        place = bisect_right(self._starts, at) - 1
        if place < 0 or (start := self._starts[place]) + self._lengths[start] < at + needed:
            return False
        length = self._lose(start)
        self._gain(start, at - start)
        self._gain(at + needed, start + length - at - needed)
        self.used += needed
        self.most = max(self.most, self.used)
        return True

    def give(self, at: int, size: int) -> None:
        """Free bytes taken before, and merge them with adjacent holes."""
        length = pages(size)
        self.used -= length
        before = bisect_left(self._starts, at) - 1
        if before >= 0 and (start := self._starts[before]) + self._lengths[start] == at:
            at, length = start, length + self._lose(start)
        if at + length in self._lengths:
            length += self._lose(at + length)
        self._gain(at, length)

    def rested(self) -> int:
        """Return the high-water mark since the last call, in bytes."""
        most, self.most = self.most, self.used
        return most

    def free(self) -> list[tuple[int, int]]:
        """Return the holes as (begin, end), by place."""
        return [(start, start + self._lengths[start]) for start in self._starts]

    def _gain(self, start: int, length: int) -> None:
        if length:
            insort(self._starts, start)
            self._lengths[start] = length
            insort(self._by_length, (length, start))

    def _lose(self, start: int) -> int:
        length = self._lengths.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        return length


def pages(size: int) -> int:
    """Round a size up to whole pages, in bytes."""
    return -(-size // PAGE) * PAGE
