"""Detection of the iteration in a sequence of events, without marks.

A sequence is a column of int64, one value per allocation: anything that is the same in every iteration, such
as a hash of size, stream and device, and never an address. A misleading sequence costs hits, never results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from traces._core import tail_period as _tail_period

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Period:
    """A tail of a sequence in which every value equals the value ``period`` places before.

    Attributes:
        period: values in one iteration.
        length: values in the tail, at least two periods; the last iteration may be partial.
        start: index of the tail's first value.
    """

    period: int
    length: int
    start: int


def tail_period(values: ArrayLike, *, min_repeats: int = 2) -> Period | None:
    """Return the period that explains most of the end of a sequence, or None.

    Among all tails that repeat some period at least ``min_repeats`` times, this is the longest; among its
    periods the smallest. A warm-up before the tail and a partial last iteration do not matter, and a nested
    period (A A A in A A A B A A A B) gives way once the longer period explains more. Exact, in linear time
    and memory: borders of the reversed sequence by the prefix function of Knuth, Morris and Pratt (1977).

    Args:
        values: int64[n].
        min_repeats: 2 or more.

    Raises:
        ValueError: ``min_repeats`` is less than 2.
        TypeError: values that are not integers.
    """
    if min_repeats < 2:
        raise ValueError("min_repeats is less than 2")
    sequence = np.asarray(values)
    if sequence.size and sequence.dtype.kind not in "iu":
        raise TypeError(f"a sequence of {sequence.dtype}, not of integers")
    sequence = np.ascontiguousarray(sequence.astype(np.int64, copy=False))
    period, length = _tail_period(sequence, min_repeats)
    return Period(period, length, len(sequence) - length) if period else None


class Detector:
    """Detector of the period of a growing sequence; amortised linear time, bounded memory.

    The detector searches the last ``capacity`` values only, so the longest period that can be found is
    ``capacity / min_repeats``. A search runs whenever a quarter more values have been appended; once
    ``capacity`` values are held, each search without a result doubles the wait, up to 16 times ``capacity``.
    The result does not depend on the pieces in which the values are appended.

    Attributes:
        found: the latest period found, its ``start`` counted from the first value ever, or None. A later
            search replaces this period, unless the new tail is shorter than one iteration of the present
            period: an inner loop does not hide the iteration around the loop.
        count: values appended since the beginning or the last `reset`.
    """

    found: Period | None
    count: int

    def __init__(self, *, capacity: int = 1 << 20, min_repeats: int = 2, min_length: int = 32) -> None:
        """Make an empty detector.

        Args:
            capacity: values remembered.
            min_repeats: iterations that must agree, 2 or more.
            min_length: values that must agree, whatever the period.

        Raises:
            ValueError: ``min_repeats`` is less than 2, or ``capacity`` less than ``min_length``.
        """
        if min_repeats < 2 or not 1 <= min_length <= capacity:
            raise ValueError("needs min_repeats >= 2 and 1 <= min_length <= capacity")
        self._capacity, self._min_repeats, self._min_length = capacity, min_repeats, min_length
        self.reset()

    def reset(self) -> None:
        """Forget all values and the period found."""
        self.found, self.count = None, 0
        # The last values, up to _end; twice the capacity, so that values move only once per `capacity`
        # appended values.
        self._values, self._end = np.empty(2 * self._min_length, np.int64), 0
        self._next_look, self._vain = self._min_length, 0

    def extend(self, values: ArrayLike) -> Period | None:
        """Append values, search if a search is due, and return `found`.

        Args:
            values: int64[n].
        """
        rest = np.asarray(values, np.int64)
        while len(rest):
            piece = rest[: min(self._next_look - self.count, self._capacity)]
            rest = rest[len(piece) :]
            self._append(piece)
            if self.count == self._next_look:
                self._look()
        return self.found

    def _append(self, piece: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        if self._end + len(piece) > len(self._values):
            kept = self._values[max(self._end - self._capacity, 0) : self._end]
            room = min(2 * self._capacity, 2 * (len(kept) + len(piece)))
            grown = self._values if room <= len(self._values) else np.empty(room, np.int64)
            grown[: len(kept)] = kept.copy()
            self._values, self._end = grown, len(kept)
        self._values[self._end : self._end + len(piece)] = piece
        self._end += len(piece)
        self.count += len(piece)

    def _look(self) -> None:
        known = self._values[max(self._end - self._capacity, 0) : self._end]
        tail = tail_period(known, min_repeats=self._min_repeats)
        if tail is not None and tail.length >= self._min_length:
            self._vain = 0
            if self.found is None or tail.length >= self.found.period:
                self.found = Period(tail.period, tail.length, self.count - tail.length)
        elif len(known) == self._capacity:
            self._vain = min(self._vain + 1, 6)
        self._next_look = self.count + (max(len(known) // 4, 1) << self._vain)
