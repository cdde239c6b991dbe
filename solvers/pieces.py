"""When buffers need memory: their lifetimes without their gaps, one row a piece."""

from __future__ import annotations

from dataclasses import dataclass
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

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows of the buffers that have any, ascending."""
        return self.owner[self.first]


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
    each = buffers.size[rows].astype(np.float64) + buffers.alignment[rows]
    total = (each * buffers.instances[rows]).sum() + buffers.offset[rows].max(initial=0)
    if total > 2.0**62:
        raise ValueError("sizes, alignments and fixed offsets add up to more than 2**62 bytes")


def on_line(pieces: Pieces, period: int, cut: int) -> Pieces:
    """Pieces on a circle, none longer than it, as pieces on the line ``[0, period)`` that begins at ``cut``.

    A piece across the cut becomes two.
    """
    start = pieces.start - cut
    start = np.where((start < 0) | (start >= period), start % period, start)
    end = start + (pieces.end - pieces.start)
    over = end > period
    owner = np.concatenate([pieces.owner[over], pieces.owner])
    first = np.concatenate([np.zeros(over.sum(), np.int64), start])
    last = np.concatenate([end[over] - period, np.minimum(end, period)])
    several = not pieces.first.all()
    order = np.lexsort((first, owner)) if several else np.argsort(owner, kind="stable")
    return Pieces(owner[order], first[order], last[order])
