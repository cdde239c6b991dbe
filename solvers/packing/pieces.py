"""Pieces of lifetime: the times in which buffers need memory, without gaps, one row per piece."""

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
    """Peak load in bytes, and the first time at which the load is lowest."""

    peak: int
    quietest: int


@dataclass(frozen=True, eq=False)
class Pieces:
    """Half-open, non-empty time intervals sorted by (owner, start); int64 columns of equal length.

    Attributes:
        owner: row of the buffer.
        start: first time at which the buffer needs memory.
        end: first later time at which the buffer needs no memory; on a circle, may exceed the period.
        size: bytes of each buffer, indexed by row.
        period: length of the circle, or None for a line.
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
        """Return a mask of the first piece of each buffer."""
        return np.diff(self.owner, prepend=-1) > 0

    @cached_property
    def single(self) -> bool:
        """True if every buffer has at most one piece."""
        return bool((self.owner[1:] > self.owner[:-1]).all())

    @cached_property
    def load(self) -> Load:
        """Load extremes without padding; on a circle all live instances count; zeros without pieces."""
        columns = self.owner, self.start, self.end, self.size
        return Load(*_core.load_extremes(*columns, self.period or 0))

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """Rows of the buffers with at least one piece, ascending."""
        return self.owner if self.single else self.owner[self.first]


def pieces_of(buffers: Buffers) -> Pieces:
    """Return the pieces of all buffers that a plan places and that need memory.

    Raises:
        ValueError: sums of sizes and offsets may not fit 64 bits.
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
    """Return ``column[rows]`` for ascending rows, as a view without a copy if the rows are contiguous."""
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
