"""Lower bounds on the arena size: the load over time, and bounds derived from the load."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from solvers import _core
from solvers.packing.options import OPTIONS

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
        """Extremes of the load without padding; on a circle, all live instances count; 0 without pieces."""
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
        # Gaps do not overlap, so the k-th start and the k-th end of a buffer delimit one piece.
        by_start, by_end = np.lexsort((start, owner)), np.lexsort((end, owner))
        owner, start, end = owner[by_start], start[by_start], end[by_end]
        keep = start < end
        owner, start, end = owner[keep], start[keep], end[keep]
    pieces = Pieces(owner, start, end, buffers.size, buffers.period)
    _check_sums(buffers, pieces.rows)
    return pieces


def at(column: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``column[rows]`` for ascending rows, as a view without a copy if the rows are contiguous."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return column[rows[0] : rows[-1] + 1]
    return column[rows]


def _check_sums(buffers: Buffers, rows: NDArray[np.int64]) -> None:
    total = 0.0
    for column in (at(buffers.size, rows), at(buffers.alignment, rows)):
        if buffers.max_instances == 1:
            total += float(column.sum(dtype=np.float64))
        else:
            total += float((column.astype(np.float64) * at(buffers.instances, rows)).sum())
    if total + at(buffers.offset, rows).max(initial=0) > 2.0**62:
        raise ValueError("sizes, alignments and fixed offsets add up to more than 2**62 bytes")


def load_curve(buffers: Buffers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the bytes alive over time without persistent buffers: (times, loads), int64[m] each.

    ``loads[k]`` holds from ``times[k]`` until the next time; the load is 0 before the first time and, on a
    line, after the last. On a circle the curve covers one period from 0, and all live instances count.
    Alignment padding is not counted.
    """
    return _curve(pieces_of(buffers))


def peak_load(buffers: Buffers) -> int:
    """Return the peak load in bytes without persistent buffers; on a circle all live instances count."""
    return pieces_of(buffers).load.peak


def lower_bound(buffers: Buffers) -> int:
    """Return a lower bound on the arena in bytes; at least the peak load.

    Three bounds are combined. Groups share no addresses, so the sum of the groups' peak loads is a bound. If
    all buffers have an alignment above 1, all live buffers except the topmost count with padding. The end of
    a buffer with a fixed offset is a bound, too.
    """
    return bound_of(buffers, pieces_of(buffers))


def bound_of(buffers: Buffers, pieces: Pieces) -> int:
    """Return the `lower_bound` of buffers whose pieces are already computed."""
    taking = pieces.rows
    if len(taking) == 0:
        return 0
    offset, size = at(buffers.offset, taking), at(buffers.size, taking)
    fixed = np.flatnonzero(offset >= 0)
    top = int((offset[fixed] + size[fixed]).max(initial=0))
    alignment = int(at(buffers.alignment, taking).min())
    groups = _by_group(pieces, buffers.group)
    plain = sum(part.load.peak for part in groups)
    if alignment == 1:
        return max(top, plain)
    padded = -(-buffers.size // alignment) * alignment
    padding = padded - buffers.size
    if not padding[taking].any():
        return max(top, plain)
    if len(groups) == 1:
        aligned = _padded_bound(dataclasses.replace(pieces, size=padded), padding)
    else:
        peaks = [dataclasses.replace(part, size=padded).load.peak for part in groups]
        aligned = sum(peaks) - int(padding[taking].max())
    return max(top, plain, aligned)


def _by_group(pieces: Pieces, group: NDArray[np.int64]) -> list[Pieces]:
    if (group == group[:1]).all():
        return [pieces]
    of = group[pieces.owner]
    order = np.argsort(of, kind="stable")
    ends = np.flatnonzero(np.diff(of[order])) + 1
    return [
        dataclasses.replace(pieces, owner=pieces.owner[k], start=pieces.start[k], end=pieces.end[k])
        for k in np.split(order, ends)
    ]


def _curve(pieces: Pieces) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    columns = pieces.owner, pieces.start, pieces.end, pieces.size
    return _core.load_curve(*columns, pieces.period or 0)


def _padded_bound(pieces: Pieces, padding: NDArray[np.int64]) -> int:
    """Return the maximum over time of the padded load minus the largest padding of a live buffer, in bytes.

    Of the buffers alive at one time, all except the topmost need their padding. Only some times of highest
    load are examined, which gives a weaker bound, not a wrong one.
    """
    times, loads = _curve(pieces)
    period = pieces.period
    best = 0
    for k in np.argsort(-loads, kind="stable")[: OPTIONS.padded_instants]:
        if loads[k] <= best:
            break
        since = times[k] - pieces.start if period is None else (times[k] - pieces.start) % period
        alive = (since >= 0) & (since < pieces.end - pieces.start)
        best = max(best, int(loads[k]) - int(padding[pieces.owner[alive]].max(initial=0)))
    return best
