"""When buffers need memory: their lifetimes without their gaps, one row a piece."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.buffers import Buffers


@dataclass(frozen=True, eq=False)
class Pieces:
    """Half-open times, none empty, sorted by (owner, start); int64 columns of one length.

    Attributes:
        owner: row of the buffer.
        start: first time at which it needs memory.
        end: first time after that at which it does not; on a circle it counts on beyond the period.
    """

    owner: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]

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
    def rows(self) -> NDArray[np.int64]:
        """Rows of the buffers that have any, ascending."""
        return self.owner if self.single else self.owner[self.first]


def pieces_of(buffers: Buffers) -> Pieces:
    """The pieces of all buffers that a plan places and that take memory.

    Raises:
        ValueError: so many bytes that sums of sizes and offsets may not fit 64 bits.
    """
    owner, start, end = np.arange(len(buffers)), buffers.start, buffers.end
    if len(buffers.gap_buffer):
        owner = np.concatenate([owner, buffers.gap_buffer])
        start = np.concatenate([start, buffers.gap_end])
        end = np.concatenate([end, buffers.gap_start])
        # The k-th start and the k-th end of a buffer belong together: gaps do not overlap.
        by_start, by_end = np.lexsort((start, owner)), np.lexsort((end, owner))
        owner, start, end = owner[by_start], start[by_start], end[by_end]
    keep = (start < end) & (buffers.size[owner] > 0) & ~buffers.persistent[owner]
    pieces = Pieces(owner[keep], start[keep], end[keep])
    _refuse_absurd(buffers, pieces.rows)
    return pieces


def _refuse_absurd(buffers: Buffers, rows: NDArray[np.int64]) -> None:
    each = (buffers.size[rows] + buffers.alignment[rows]).astype(np.float64)
    if buffers.max_instances > 1:
        each *= buffers.instances[rows]
    if each.sum() + buffers.offset[rows].max(initial=0) > 2.0**62:
        raise ValueError("sizes, alignments and fixed offsets add up to more than 2**62 bytes")


def on_line(pieces: Pieces, period: int, cut: int) -> Pieces:
    """Pieces on a circle, none longer than it, as pieces on the line ``[0, period)`` that begins at ``cut``.

    A piece across the cut becomes two.
    """
    start = (pieces.start - cut) % period
    end = start + (pieces.end - pieces.start)
    over = np.flatnonzero(end > period)
    if len(over) == 0 and pieces.single:
        return Pieces(pieces.owner, start, end)
    # What is across the cut has its second part, at the beginning of the line, before the first.
    owner, first = np.insert(pieces.owner, over, pieces.owner[over]), np.insert(start, over, 0)
    last = np.insert(np.minimum(end, period), over, end[over] - period)
    if pieces.single:
        return Pieces(owner, first, last)
    order = np.lexsort((first, owner))
    return Pieces(owner[order], first[order], last[order])
