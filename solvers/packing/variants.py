"""VariantSet packing of iteration variants (`IterationVariant`), any of which may follow any other.

Each variant has separate buffers. A buffer still alive at the end of an iteration is freed during the next
iteration, of any variant, and conflicts there only with the buffers that live before this free. All variants
are laid out on one time line (`VariantSet`), on which the time of each variant appears once for each possible
predecessor. A buffer that outlives an iteration has one piece of lifetime in this iteration and one in
each follower's time after the same variant; between these pieces the buffer needs no memory. The result is a
packing problem of buffers with gaps, whose peak load is the largest over all successions of variants.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from traces.buffers import Buffers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Pieces = tuple[NDArray[np.int64], NDArray[np.int64]]


#: Largest number of iterations after which addresses repeat: a buffer lives in its own iteration and at most
#: two more.
MOST_COLUMNS = 3


@dataclass(frozen=True, eq=False)
class IterationVariant:
    """One iteration variant.

    Attributes:
        buffers: n rows in order of allocation, of one group, without gaps, on a circle of n allocations: row
            k starts at time k. Ends beyond n are ignored, see ``reach``. Persistent buffers are not placed.
        reach: int64[n, K], for each of the K variants: the number of allocations before the buffer's free,
            counted from the beginning of a following iteration of that variant. 0: the buffer is freed in the
            same iteration. A value beyond the follower's end: the buffer lives on into the iteration after
            the follower, at most to the end of that iteration.
        sequence: int64[n], distinguishes buffers of equal size. If two variants begin with the same sizes and
            sequences, the buffers of this common beginning get the same offsets in both variants, so replay
            does not need to know yet which variant is running.
        least: int64[n], minimum size in bytes of each buffer in a variant of varying sizes, whose maximum
            sizes are those of ``buffers``; two beginnings then count as equal if their ranges of sizes
            overlap. None: the sizes do not vary.
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
        """Return the buffers on a circle, with lifetimes as if this variant, `number`, followed itself."""
        n = len(self)
        end = np.where(self.outlives, n + self.reach[:, number], np.minimum(self.buffers.end, n))
        return dataclasses.replace(self.buffers, end=end)


class VariantSet:
    """All variants on one time line.

    Attributes:
        buffers: each buffer of each variant, once for each of the `columns`; variants with a common beginning
            share the buffers of this beginning.
        columns: number of iterations after which addresses repeat.
        couples: bool for each of `buffers`: true if several variants share the buffer or the buffer outlives
            an iteration. All other buffers meet only buffers of their own variant and coupling buffers.
    """

    couples: NDArray[np.bool_]

    def __init__(self, kinds: Sequence[IterationVariant]) -> None:
        """Lay out the variants.

        Args:
            kinds: the variants; each ``reach`` has one column for each variant, in this order.
        """
        self._kinds = kinds
        self._length = np.array([len(kind) for kind in kinds])
        self.columns = max(_columns(kind, self._length) for kind in kinds)
        count = len(kinds)
        #: For each variant, the length of the beginning in which buffers of the preceding iteration may be
        #: alive.
        self._head = np.array(
            [min(max(int(k.reach[:, j].max(initial=0)) for k in kinds), len(kinds[j])) for j in range(count)]
        )
        if any((kind.reach > self._length).any() for kind in kinds):  # a buffer outlives the next iteration
            self._head = self._length.copy()
        span = count * self._head + (self._length - self._head)  # time of one column of each variant
        self._begin = np.cumsum(span) - span
        self._span = int(span.sum())
        self._node = _shared_beginnings(kinds)
        self.buffers = self._lay_out()

    def offsets(self, offset: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the offsets of each variant, int64[n, columns] as in `solvers.Plan`.

        Args:
            offset: int64 for each of `buffers`.
        """
        columns = np.arange(self.columns)
        found = []
        for kind, node in zip(self._kinds, self._node, strict=True):
            mine = offset[node[:, None] * self.columns + columns]
            found.append(np.where(kind.buffers.persistent[:, None], -1, mine))
        return found

    def _at(self, before: int, kind: int, column: int) -> int:
        """Return the time at which variant `kind` begins in `column` when variant `before` precedes."""
        return int((column % self.columns) * self._span + self._begin[kind] + before * self._head[kind])

    def _lay_out(self) -> Buffers:
        size = np.zeros((max(int(node.max()) for node in self._node) + 1) * self.columns, np.int64)
        alignment, stream = np.ones_like(size), np.zeros_like(size)
        uses, couples = np.zeros_like(size), np.zeros(len(size), np.bool_)
        pieces = []
        for number, (kind, node) in enumerate(zip(self._kinds, self._node, strict=True)):
            for column in range(self.columns):
                owner = node * self.columns + column
                size[owner] = np.maximum(size[owner], kind.buffers.size)  # shared buffers may vary in size
                alignment[owner] = kind.buffers.alignment
                stream[owner] = kind.buffers.stream
                uses[owner] += 1
                couples[owner[kind.outlives]] = True
                for start, end in self._pieces(kind, number, column):
                    keep = (start < end) & ~kind.buffers.persistent
                    pieces.append((owner[keep], start[keep], end[keep]))
        self.couples = couples | (uses > 1)
        self._owner, self._start, self._end = (np.concatenate(part) for part in zip(*pieces, strict=True))
        return _with_pieces(self._owner, self._start, self._end, size, alignment=alignment, stream=stream)

    def apart(self) -> Iterator[tuple[NDArray[np.int64], Buffers, NDArray[np.int64], Pieces]]:
        """Split the problem by variant and column into own buffers and coupling buffers.

        Yields:
            Rows of the variant's own (not coupling) buffers in `buffers`; these buffers on a line of the
            variant's allocations; rows of the coupling buffers, with repetitions; and the coupling buffers'
            pieces of lifetime on that line, (start, end). The pieces of all possible preceding variants are
            included, so coupling buffers left alive by different predecessors may overlap.
        """
        for number, kind in enumerate(self._kinds):
            n, head, count = len(kind), int(self._head[number]), len(self._kinds)
            end = np.minimum(kind.buffers.end, n)
            for column in range(self.columns):
                row = self._node[number] * self.columns + column
                own = np.flatnonzero(~self.couples[row] & ~kind.buffers.persistent)
                line = Buffers.of(
                    own,
                    end[own],
                    kind.buffers.size[own],
                    alignment=kind.buffers.alignment[own],
                    stream=kind.buffers.stream[own],
                )
                since = self._start - self._at(0, number, column)
                here = np.flatnonzero(
                    self.couples[self._owner] & (since >= 0) & (since < count * head + n - head)
                )
                # The last of the repeated beginnings continues with the rest of the iteration.
                begin = np.minimum(since[here] // max(head, 1), count - 1) * head
                start = since[here] - begin
                length = self._end[here] - self._start[here]
                yield row[own], line, self._owner[here], (start, start + length)

    def _pieces(self, kind: IterationVariant, number: int, column: int) -> list[Pieces]:
        """Return lists of pieces (start, end), each over all buffers of one column; some pieces are empty."""
        born, end, head = (
            np.arange(len(kind)),
            np.minimum(kind.buffers.end, len(kind)),
            int(self._head[number]),
        )
        end = np.where(kind.outlives, len(kind), end)
        count = len(self._kinds)
        pieces = [
            (at + born, at + np.minimum(end, head))
            for at in (self._at(before, number, column) for before in range(count))
        ]
        at = self._at(count - 1, number, column)  # the last beginning goes on to the iteration's end
        pieces.append((at + np.maximum(born, head), at + end))
        for follower in range(count):
            reach = np.where(kind.outlives, kind.reach[:, follower], 0)
            at, length = self._at(number, follower, column + 1), int(self._length[follower])
            pieces.append((np.full(len(kind), at), at + np.minimum(reach, length)))
            if not (beyond := np.maximum(reach - length, 0)).any():
                continue
            for second in range(count):
                at = self._at(follower, second, column + 2)
                pieces.append((np.full(len(kind), at), at + np.minimum(beyond, self._length[second])))
        return pieces


def agree_on_persistent(kinds: Sequence[IterationVariant]) -> list[IterationVariant]:
    """Return copies in which a buffer of a common beginning is persistent in all variants or in none."""
    nodes = _shared_beginnings(kinds)
    left = np.zeros(max(int(node.max(initial=-1)) for node in nodes) + 1, np.bool_)
    for kind, node in zip(kinds, nodes, strict=True):
        left[node[kind.buffers.persistent]] = True
    return [
        dataclasses.replace(
            kind,
            buffers=dataclasses.replace(kind.buffers, persistent=left[node]),
            reach=np.where(left[node][:, None], 0, kind.reach),
        )
        for kind, node in zip(kinds, nodes, strict=True)
    ]


def _columns(kind: IterationVariant, length: NDArray[np.int64]) -> int:
    """Return the number of columns a variant needs so that no buffer meets its own successor."""
    reach = np.where(kind.outlives[:, None], kind.reach, 0)
    born = np.arange(len(kind))[:, None]
    columns = np.where(reach > born, 2, 1)
    beyond = reach - length
    columns = np.where(beyond > 0, np.where(beyond > born, 3, 2), columns)
    return int(columns.max(initial=1))


def _shared_beginnings(kinds: Sequence[IterationVariant]) -> list[NDArray[np.int64]]:
    """Return a number for each buffer of each variant; equal in two variants that agree up to this buffer."""
    count = 0
    #: By (number of the preceding buffer, sequence): ranges of sizes (low, high) that may follow, with their
    #: number.
    following: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    found = []
    for kind in kinds:
        most = kind.buffers.size
        least = most if kind.least is None else kind.least
        number, mine = -1, []
        for lo, hi, sequence in zip(least.tolist(), most.tolist(), kind.sequence.tolist(), strict=True):
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
    """Return buffers with these pieces of lifetime, in any order; those without pieces get length 0."""
    order = np.lexsort((start, owner))
    owner, start, end = owner[order], start[order], end[order]
    axis = (
        int(end.max(initial=0)) + 1
    )  # owners on disjoint parts of the axis, so that the running maximum of ends stays within one owner
    end = np.maximum.accumulate(end + owner * axis) - owner * axis
    first = np.diff(owner, prepend=-1) > 0
    last = np.append(first, True)[1:]
    begin, over = np.zeros_like(size), np.zeros_like(size)
    begin[owner[first]], over[owner[last]] = start[first], end[last]
    gaps = np.stack([owner[1:], end[:-1], start[1:]], axis=1)[~first[1:]]
    return Buffers.of(
        begin, over, size, gaps=gaps[gaps[:, 1] < gaps[:, 2]], alignment=alignment, stream=stream
    )
