"""Packing problem on a time line, the input of every solver."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from solvers import _core
from solvers._core import Jobs as NativeJobs
from solvers.packing.bounds import Pieces, bound_of, pieces_of
from solvers.packing.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from traces.buffers import Buffers


@dataclass(frozen=True, eq=False)
class Jobs:
    """Buffers to pack, each with one or more pieces of lifetime; int64 columns.

    Two jobs may not overlap in addresses if any of their pieces overlap in time. Circles and gaps have been
    converted to pieces, and each instance of a buffer that outlives the period to a separate job.

    Attributes:
        row: row of the job's buffer, or -1 for an occupied range of addresses.
        pieces: number of pieces of the job, at least 1.
        start: first time of each piece; the pieces of a job are consecutive and in order.
        end: first time after each piece, later than the piece's start.
        size: bytes, at least 1.
        alignment: a power of two that divides the offset.
        fixed: the required offset, or -1.
        lower_bound: lower bound in bytes on the arena for these jobs.
    """

    row: NDArray[np.int64]
    pieces: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    size: NDArray[np.int64]
    alignment: NDArray[np.int64]
    fixed: NDArray[np.int64]
    lower_bound: int

    def __len__(self) -> int:
        return len(self.row)

    @property
    def first(self) -> NDArray[np.int64]:
        """Return the index of the first piece of each job."""
        return np.cumsum(self.pieces) - self.pieces

    @property
    def lifetime(self) -> NDArray[np.int64]:
        """Return the total time in which each job needs memory, without gaps."""
        return np.add.reduceat(self.end - self.start, self.first) if len(self) else self.pieces

    @cached_property
    def unit(self) -> int:
        """Greatest common divisor of all sizes, alignments and fixed offsets, in bytes.

        There is a smallest plan with multiples of this unit as offsets, since offsets are aligned sums of
        sizes once all jobs are pushed down.
        """
        values = np.concatenate([self.size, self.alignment[self.alignment > 1], self.fixed[self.fixed > 0]])
        return int(np.gcd.reduce(values))

    def attainable(self, arena: int) -> int:
        """Return the smallest possible arena size >= ``arena`` of a smallest plan: the end of a job."""
        free = self.fixed < 0
        step = np.lcm(self.alignment[free], self.unit)
        size = self.size[free]
        ends = np.maximum(-(-(arena - size) // step), 0) * step + size
        kept = self.fixed[~free] + self.size[~free]
        return int(min(ends.min(initial=2**63 - 1), kept[kept >= arena].min(initial=2**63 - 1)))

    def native(self) -> NativeJobs:
        """Return these jobs for the native kernels; converted once."""
        return self._native

    @cached_property
    def _native(self) -> NativeJobs:
        return NativeJobs(self.pieces, self.start, self.end, self.size, self.alignment, self.fixed)


def jobs_of(
    buffers: Buffers,
    bound: int | None = None,
    taken: Sequence[tuple[int, int]] = (),
    pieces: Pieces | None = None,
) -> Jobs:
    """Convert the buffers that need memory to jobs; lifetimes must not be longer than the period.

    Args:
        buffers: buffers of one group. A circle is cut where the fewest bytes are alive.
        bound: lower bound of the buffers if already known.
        taken: occupied ranges of addresses, (from, to), which the buffers must avoid.
        pieces: pieces of the buffers if already known.
    """
    pieces = pieces_of(buffers) if pieces is None else pieces
    bound = bound_of(buffers, pieces) if bound is None else bound
    period, cut = (0, 0) if buffers.period is None else (buffers.period, pieces.load.quietest)
    row, counts, start, end = _core.to_line(
        pieces.owner,
        pieces.start,
        pieces.end,
        period,
        cut,
        by_start=len(pieces.rows) > OPTIONS.sorted_by_start,
    )
    jobs = Jobs(
        row,
        counts,
        start,
        end,
        buffers.size[row],
        _each(buffers.alignment, row),
        _each(buffers.offset, row),
        bound,
    )
    return _with_taken(jobs, np.asarray(taken, np.int64).reshape(-1, 2)) if taken else jobs


def _each(column: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``column[row]``, without indexing if all values are equal, as most alignments are."""
    return np.full(len(row), column[0]) if (column == column[:1]).all() and len(column) else column[row]


def _with_taken(jobs: Jobs, taken: NDArray[np.int64]) -> Jobs:
    """Return the jobs plus one fixed job with unlimited lifetime for each range in `taken`."""
    k = len(taken)
    ones = np.ones(k, np.int64)
    return Jobs(
        np.append(jobs.row, -ones),
        np.append(jobs.pieces, ones),
        np.append(jobs.start, np.full(k, jobs.start.min(initial=0))),
        np.append(jobs.end, np.full(k, jobs.end.max(initial=1))),
        np.append(jobs.size, taken[:, 1] - taken[:, 0]),
        np.append(jobs.alignment, ones),
        np.append(jobs.fixed, taken[:, 0]),
        _bound_between(jobs.lower_bound, taken),
    )


def _bound_between(size: int, taken: NDArray[np.int64]) -> int:
    """Return the smallest arena with ``size`` bytes outside the ranges ``taken``."""
    end = 0
    for low, high in sorted(map(tuple, taken.tolist())):
        if low - end >= size:
            break
        size -= max(low - end, 0)
        end = max(end, high)
    return end + size
