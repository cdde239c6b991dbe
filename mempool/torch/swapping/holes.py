"""Who has which bytes of one arena: best fit, where no place is planned."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

#: Copies begin at a page, and take whole ones.
PAGE = 4096


class Holes:
    """What is free of an arena of ``size`` bytes, a multiple of a page, by place and by length.

    Attributes:
        size: bytes of the arena.
        used: bytes that are taken, whole pages.
        most: most of these at once since `rested` was last asked.
    """

    def __init__(self, size: int) -> None:
        self.size, self.used, self.most = size, 0, 0
        self._starts = [0] if size else []
        self._lengths = {0: size} if size else {}
        self._by_length = [(size, 0)] if size else []

    def take(self, size: int) -> int | None:
        """Where so many bytes, 1 or more, are now taken; None: no hole is large enough."""
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
        """The same at the end of the last hole that is large enough, where it is in nobody's way for long."""
        needed = pages(size)
        for at in reversed(self._starts):
            if (length := self._lengths[at]) >= needed:
                begin = at + length - needed
                self.take_at(begin, size)
                return begin
        return None

    def take_at(self, at: int, size: int) -> bool:
        """Take so many bytes, 1 or more, from this page on; False: something else has some of them."""
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
        """Free what `take` took; it joins with the holes beside it."""
        length = pages(size)
        self.used -= length
        before = bisect_left(self._starts, at) - 1
        if before >= 0 and (start := self._starts[before]) + self._lengths[start] == at:
            at, length = start, length + self._lose(start)
        if at + length in self._lengths:
            length += self._lose(at + length)
        self._gain(at, length)

    def rested(self) -> int:
        """Most that was taken at once since the last call, bytes."""
        most, self.most = self.most, self.used
        return most

    def free(self) -> list[tuple[int, int]]:
        """The holes as (begin, end), by place."""
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
    """Bytes of the whole pages that so many bytes take."""
    return -(-size // PAGE) * PAGE
