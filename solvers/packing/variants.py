"""Joint packing of iteration variants (`IterationVariant`), any of which may follow any other.

Each variant has separate buffers. A buffer alive at the end of an iteration is freed during the next
iteration, of any variant, and conflicts there only with buffers that start before this free. One time line
(`VariantSet`) contains all variants, and each variant once for each possible predecessor. A buffer that
outlives an iteration has one piece of lifetime in this iteration and one in each possible follower; between
these pieces the buffer needs no memory. The result is a packing problem of buffers with gaps, whose peak load
is the largest over all successions of variants.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from solvers.packing.options import OPTIONS
from traces.buffers import Buffers
from traces.intervals import union_of_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from solvers.packing.plan import Plan

    Pieces = tuple[NDArray[np.int64], NDArray[np.int64]]


#: Largest number of iterations after which addresses repeat: a buffer lives in at most three iterations.
MOST_COLUMNS = 3


@dataclass(frozen=True, eq=False)
class IterationVariant:
    """One iteration variant.

    Attributes:
        buffers: n rows in order of allocation, of one group, without gaps, on a circle of n allocations: row
            k starts at time k. Ends beyond n are ignored, see ``reach``. Persistent buffers are not placed.
        reach: int64[n, K], for each of the K variants as the next iteration: the number of its allocations
            before the buffer's free. 0: the buffer is freed in the same iteration. A value beyond the
            follower's end: the buffer lives into the iteration after the follower, at most to its end.
        sequence: int64[n], distinguishes buffers of equal size. If two variants begin with the same sizes and
            sequences, the buffers of this common beginning get the same offsets in both variants, since
            replay cannot yet distinguish the variants.
        least: int64[n], least size in bytes of each buffer in a variant of varying sizes; ``buffers`` has the
            largest sizes. Two beginnings count as equal if their ranges of sizes overlap. None: the sizes do
            not vary.
    """

    buffers: Buffers
    reach: NDArray[np.int64]
    sequence: NDArray[np.int64]
    least: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.buffers)

    @cached_property
    def outlives(self) -> NDArray[np.bool_]:
        """Mask of the buffers alive at the iteration's end: bool[n]."""
        alive: NDArray[np.bool_] = (self.reach > 0).any(axis=1) & ~self.buffers.persistent
        return alive

    def following_itself(self, number: int) -> Buffers:
        """Return the buffers on a circle, with lifetimes as if this variant (`number`) followed itself."""
        n = len(self)
        end = np.where(self.outlives, n + self.reach[:, number], np.minimum(self.buffers.end, n))
        return dataclasses.replace(self.buffers, end=end)


class VariantSet:
    """All variants on one time line.

    Attributes:
        buffers: each buffer of each variant, once for each of the `columns`; variants with a common beginning
            share the buffers of this beginning.
        columns: number of iterations after which addresses repeat.
        coupling: bool for each of `buffers`: true if several variants share the buffer, or if the buffer
            outlives an iteration. All other buffers overlap in time only with buffers of their own variant
            and with coupling buffers.
    """

    coupling: NDArray[np.bool_]

    def __init__(self, variants: Sequence[IterationVariant]) -> None:
        """Lay out the variants.

        Args:
            variants: the variants; each ``reach`` has one column for each variant, in this order.
        """
        self._variants = variants
        self._length = np.array([len(variant) for variant in variants])
        self.columns = max(_columns(variant, self._length) for variant in variants)
        count = len(variants)
        #: For each variant, the number of allocations up to the last free of a preceding iteration's buffer.
        self._head = np.array(
            [
                min(max(int(k.reach[:, j].max(initial=0)) for k in variants), len(variants[j]))
                for j in range(count)
            ]
        )
        if any(
            (variant.reach > self._length).any() for variant in variants
        ):  # a buffer outlives the next iteration
            self._head = self._length.copy()
        span = count * self._head + (self._length - self._head)  # time of one column of each variant
        self._begin = np.cumsum(span) - span
        self._span = int(span.sum())
        self._node = _shared_beginnings(variants)
        self.buffers = self._lay_out()

    def offsets(self, offset: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the offsets of each variant, int64[n, columns] as in `solvers.Plan`.

        Args:
            offset: int64 for each of `buffers`.
        """
        columns = np.arange(self.columns)
        found = []
        for variant, node in zip(self._variants, self._node, strict=True):
            mine = offset[node[:, None] * self.columns + columns]
            found.append(np.where(variant.buffers.persistent[:, None], -1, mine))
        return found

    def _at(self, before: int, variant: int, column: int) -> int:
        """Return the time at which `variant` begins in `column` after variant `before`."""
        return int((column % self.columns) * self._span + self._begin[variant] + before * self._head[variant])

    def _lay_out(self) -> Buffers:
        size = np.zeros((max(int(node.max()) for node in self._node) + 1) * self.columns, np.int64)
        alignment, stream = np.ones_like(size), np.zeros_like(size)
        uses, coupling = np.zeros_like(size), np.zeros(len(size), np.bool_)
        pieces = []
        for number, (variant, node) in enumerate(zip(self._variants, self._node, strict=True)):
            for column in range(self.columns):
                owner = node * self.columns + column
                size[owner] = np.maximum(size[owner], variant.buffers.size)  # shared buffers may vary in size
                alignment[owner] = variant.buffers.alignment
                stream[owner] = variant.buffers.stream
                uses[owner] += 1
                coupling[owner[variant.outlives]] = True
                for start, end in self._pieces(variant, number, column):
                    keep = (start < end) & ~variant.buffers.persistent
                    pieces.append((owner[keep], start[keep], end[keep]))
        self.coupling = coupling | (uses > 1)
        self._owner, self._start, self._end = (np.concatenate(part) for part in zip(*pieces, strict=True))
        return _with_pieces(self._owner, self._start, self._end, size, alignment=alignment, stream=stream)

    def subproblems(self) -> Iterator[tuple[NDArray[np.int64], Buffers, NDArray[np.int64], Pieces]]:
        """Split the problem by variant and column into own buffers and coupling buffers.

        Yields:
            Rows of the variant's own (not coupling) buffers in `buffers`; these buffers on a line of the
            variant's allocations; rows of the coupling buffers, with repetitions; and the coupling buffers'
            pieces of lifetime on that line, (start, end). Pieces after all possible predecessors are
            included, so coupling buffers of different predecessors may overlap.
        """
        for number, variant in enumerate(self._variants):
            n, head, count = len(variant), int(self._head[number]), len(self._variants)
            end = np.minimum(variant.buffers.end, n)
            for column in range(self.columns):
                row = self._node[number] * self.columns + column
                own = np.flatnonzero(~self.coupling[row] & ~variant.buffers.persistent)
                line = Buffers.of(
                    own,
                    end[own],
                    variant.buffers.size[own],
                    alignment=variant.buffers.alignment[own],
                    stream=variant.buffers.stream[own],
                )
                since = self._start - self._at(0, number, column)
                here = np.flatnonzero(
                    self.coupling[self._owner] & (since >= 0) & (since < count * head + n - head)
                )
                # The last repeated beginning is followed by the remainder of the iteration.
                begin = np.minimum(since[here] // max(head, 1), count - 1) * head
                start = since[here] - begin
                length = self._end[here] - self._start[here]
                yield row[own], line, self._owner[here], (start, start + length)

    def _pieces(self, variant: IterationVariant, number: int, column: int) -> list[Pieces]:
        """Return lists of pieces (start, end), each over all buffers of one column; some pieces are empty."""
        birth, end, head = (
            np.arange(len(variant)),
            np.minimum(variant.buffers.end, len(variant)),
            int(self._head[number]),
        )
        end = np.where(variant.outlives, len(variant), end)
        count = len(self._variants)
        pieces = [
            (at + birth, at + np.minimum(end, head))
            for at in (self._at(before, number, column) for before in range(count))
        ]
        at = self._at(count - 1, number, column)  # the last beginning extends to the iteration's end
        pieces.append((at + np.maximum(birth, head), at + end))
        for follower in range(count):
            reach = np.where(variant.outlives, variant.reach[:, follower], 0)
            at, length = self._at(number, follower, column + 1), int(self._length[follower])
            pieces.append((np.full(len(variant), at), at + np.minimum(reach, length)))
            if not (beyond := np.maximum(reach - length, 0)).any():
                continue
            for second in range(count):
                at = self._at(follower, second, column + 2)
                pieces.append((np.full(len(variant), at), at + np.minimum(beyond, self._length[second])))
        return pieces


def agree_on_persistent(variants: Sequence[IterationVariant]) -> list[IterationVariant]:
    """Return copies in which each buffer of a common beginning is persistent in all variants or in none."""
    nodes = _shared_beginnings(variants)
    left = np.zeros(max(int(node.max(initial=-1)) for node in nodes) + 1, np.bool_)
    for variant, node in zip(variants, nodes, strict=True):
        left[node[variant.buffers.persistent]] = True
    return [
        dataclasses.replace(
            variant,
            buffers=dataclasses.replace(variant.buffers, persistent=left[node]),
            reach=np.where(left[node][:, None], 0, variant.reach),
        )
        for variant, node in zip(variants, nodes, strict=True)
    ]


def _columns(variant: IterationVariant, length: NDArray[np.int64]) -> int:
    """Return the number of columns with which no buffer of a variant overlaps its own successor."""
    reach = np.where(variant.outlives[:, None], variant.reach, 0)
    birth = np.arange(len(variant))[:, None]
    columns = np.where(reach > birth, 2, 1)
    beyond = reach - length
    columns = np.where(beyond > 0, np.where(beyond > birth, 3, 2), columns)
    return int(columns.max(initial=1))


def _shared_beginnings(variants: Sequence[IterationVariant]) -> list[NDArray[np.int64]]:
    """Return a number for each buffer of each variant, equal in variants that agree up to this buffer."""
    count = 0
    #: By (number of the preceding buffer, sequence): ranges of sizes (low, high) that may follow, with their
    #: number.
    following: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    found = []
    for variant in variants:
        most = variant.buffers.size
        least = most if variant.least is None else variant.least
        number, mine = -1, []
        for lo, hi, sequence in zip(least.tolist(), most.tolist(), variant.sequence.tolist(), strict=True):
            ranges = following.setdefault((number, sequence), [])
            at = next((i for i, (low, high, _) in enumerate(ranges) if low <= hi and lo <= high), len(ranges))
            if at == len(ranges):
                ranges.append((lo, hi, count))
                count += 1
            low, high, number = ranges[at]
            ranges[at] = min(low, lo), max(high, hi), number
            mine.append(number)
        found.append(np.array(mine, np.int64))
    return found


def _with_pieces(
    owner: NDArray[np.int64],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    size: NDArray[np.int64],
    alignment: NDArray[np.int64],
    stream: NDArray[np.int64],
) -> Buffers:
    """Return buffers with these pieces of lifetime, in any order; buffers without pieces get length 0."""
    order = np.lexsort((start, owner))
    owner, start, end = owner[order], start[order], end[order]
    axis = (
        int(end.max(initial=0)) + 1
    )  # disjoint sections per owner, so that the running maximum of ends is per owner
    end = np.maximum.accumulate(end + owner * axis) - owner * axis
    first = np.diff(owner, prepend=-1) > 0
    last = np.append(first, True)[1:]
    begin, over = np.zeros_like(size), np.zeros_like(size)
    begin[owner[first]], over[owner[last]] = start[first], end[last]
    gaps = np.stack([owner[1:], end[:-1], start[1:]], axis=1)[~first[1:]]
    return Buffers.of(
        begin, over, size, gaps=gaps[gaps[:, 1] < gaps[:, 2]], alignment=alignment, stream=stream
    )


def pack_coupled(
    joint: VariantSet, solve: Callable[[Buffers], Plan], *, around: Sequence[tuple[int, int]] = ()
) -> NDArray[np.int64] | None:
    """Pack all of ``joint.buffers`` and return their offsets, int64, or None.

    Return None if the decomposition does not help (too many coupling buffers, several streams, too many
    rectangles) or if `solve` found no offsets, for example after an interrupt.

    Args:
        joint: the variants on one line.
        solve: makes a plan for buffers on a line, some of which have fixed offsets.
        around: non-overlapping (begin, end) ranges of offsets that no buffer may use.
    """
    rows = np.flatnonzero(joint.coupling)
    if len(rows) > OPTIONS.coupling_share * len(joint.buffers) or len(set(joint.buffers.stream.tolist())) > 1:
        return None
    offset = np.full(len(joint.buffers), -1, np.int64)
    length = int(joint.buffers.end.max(initial=0))
    kept = [(0, length, begin, end) for begin, end in around]
    found = _solve_around(joint.buffers.select(rows), kept, solve)
    if found is None:
        return None
    offset[rows] = found
    for own, line, owner, (start, end) in joint.subproblems():
        low = offset[owner]
        boxes = list(_disjoint(start, end, low, low + joint.buffers.size[owner]))
        if len(boxes) > OPTIONS.coupling_rectangles:
            return None
        found = _solve_around(line, boxes + [(0, length, *box[2:]) for box in kept], solve)
        if found is None:
            return None
        offset[own] = found
    return offset


def _solve_around(
    buffers: Buffers, boxes: Sequence[tuple[int, int, int, int]], solve: Callable[[Buffers], Plan]
) -> NDArray[np.int64] | None:
    """Return offsets of buffers around boxes (start, end, begin, end) of time and address, or None."""
    n = len(buffers)
    if n == 0:
        return np.zeros(0, np.int64)
    start, end, low, high = np.array(boxes, np.int64).reshape(-1, 4).T
    free = np.ones(len(boxes), np.int64)
    gaps = np.stack([buffers.gap_buffer, buffers.gap_start, buffers.gap_end], axis=1)
    plan = solve(
        Buffers.of(
            np.concatenate([buffers.start, start]),
            np.concatenate([buffers.end, end]),
            np.concatenate([buffers.size, high - low]),
            alignment=np.concatenate([buffers.alignment, free]),
            offset=np.concatenate([np.full(n, -1), low]),
            gaps=gaps,
        )
    )
    return None if plan.offset is None else plan.offset[:n, 0]


def _disjoint(
    start: NDArray[np.int64], end: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield non-overlapping rectangles (start, end, low, high) that cover the area of the given ones."""
    times = np.unique(np.concatenate([start, end])).tolist()
    open_: dict[tuple[int, int], int] = {}  # range of addresses -> start time
    for time in times:
        alive = (start <= time) & (time < end)
        now = dict.fromkeys(
            union_of_ranges(zip(low[alive].tolist(), high[alive].tolist(), strict=True)), time
        )
        for place, since in open_.items():
            if place in now:
                now[place] = since
            else:
                yield since, time, *place
        open_ = now
