"""When buffers need memory: their lifetimes without their gaps, one row a piece."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from solvers import _core

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.buffers import Buffers


class Load(NamedTuple):
    """Bytes alive: the most at one time, and the first time at which the fewest are."""

    peak: int
    quietest: int


@dataclass(frozen=True, eq=False)
class Pieces:
    """Half-open times, none empty, sorted by (owner, start); int64 columns of one length.

    Attributes:
        owner: row of the buffer.
        start: first time at which it needs memory.
        end: first time after that at which it does not; on a circle it counts on beyond the period.
        size: bytes of each buffer, by its row.
        period: length of the circle, or None.
    """

    owner: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    size: NDArray[np.int64]
    period: int | None

    def __len__(self) -> int:
        return len(self.owner)

    @property
    def first(self) -> NDArray[np.bool_]:
        """Which of them is the first of its buffer."""
        return np.diff(self.owner, prepend=-1) > 0

    @cached_property
    def single(self) -> bool:
        """Whether no buffer has more than one."""
        return bool((self.owner[1:] > self.owner[:-1]).all())

    @cached_property
    def load(self) -> Load:
        """Alignment is not counted; on a circle every instance alive is. Zeros where there are no pieces."""
        columns = self.owner, self.start, self.end, self.size
        return Load(*_core.load_extremes(*columns, self.period or 0))

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """Rows of the buffers that have any, ascending."""
        return self.owner if self.single else self.owner[self.first]


def pieces_of(buffers: Buffers) -> Pieces:
    """The pieces of all buffers that a plan places and that take memory.

    Raises:
        ValueError: so many bytes that sums of sizes and offsets may not fit 64 bits.
    """
    taking = (buffers.start < buffers.end) & (buffers.size > 0) & ~buffers.persistent
    owner = rows = np.flatnonzero(taking)
    start, end = at(buffers.start, rows), at(buffers.end, rows)
    if len(buffers.gap_buffer):
        gap = taking[buffers.gap_buffer]
        owner = np.concatenate([owner, buffers.gap_buffer[gap]])
        start = np.concatenate([start, buffers.gap_end[gap]])
        end = np.concatenate([end, buffers.gap_start[gap]])
        # The k-th start and the k-th end of a buffer belong together: gaps do not overlap.
        by_start, by_end = np.lexsort((start, owner)), np.lexsort((end, owner))
        owner, start, end = owner[by_start], start[by_start], end[by_end]
        keep = start < end
        owner, start, end = owner[keep], start[keep], end[keep]
    pieces = Pieces(owner, start, end, buffers.size, buffers.period)
    _refuse_absurd(buffers, pieces.rows)
    return pieces


def at(column: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """``column[rows]`` of ascending rows; where none is left out between them, without a copy."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return column[rows[0] : rows[-1] + 1]
    return column[rows]


def _refuse_absurd(buffers: Buffers, rows: NDArray[np.int64]) -> None:
    total = 0.0
    for column in (at(buffers.size, rows), at(buffers.alignment, rows)):
        if buffers.max_instances == 1:
            total += float(column.sum(dtype=np.float64))
        else:
            total += float((column.astype(np.float64) * at(buffers.instances, rows)).sum())
    if total + at(buffers.offset, rows).max(initial=0) > 2.0**62:
        raise ValueError("sizes, alignments and fixed offsets add up to more than 2**62 bytes")
