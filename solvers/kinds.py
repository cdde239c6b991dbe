"""Iterations of several kinds, any of which may follow any other: offsets for all of them at once.

Each kind of iteration has buffers of its own. What is still alive at the end of one is freed somewhere in
the next, whichever kind that is, so it excludes what lives there before that, and nothing else. On a line on
which each kind's time stands once for each kind that may have come before it, such a buffer has one piece of
lifetime where it was allocated and one in the time behind its own kind of each; between these it needs no
memory. So the problem is one of buffers with gaps, whose load is the largest of any succession.
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


#: Iterations after which addresses repeat: a buffer lives in its own one and at most two more.
MOST_COLUMNS = 3


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of iteration.

    Attributes:
        buffers: n rows in order of allocation, of one group, without gaps, on a circle of n allocations: the
            k-th starts at k. Ends beyond n count for nothing: see ``reach``. Persistent ones are not placed.
        reach: int64[n, K], for each of the K kinds: how many allocations, from the beginning of an iteration
            of that kind which follows this one, come before the buffer's free. 0: it is freed in its own
            iteration; beyond the follower's end it lives on in the iteration after that, at most to its end.
        sequence: int64[n], what tells buffers of equal size apart: where two kinds begin with the same sizes
            and sequences, these have the same offsets in both, so that nothing hangs on which of them it is.
        least: int64[n], of a kind whose sizes vary, the bytes that each buffer has at least, where those of
            ``buffers`` are the most: a beginning is the same where the sizes may be. None: they do not vary.
    """

    buffers: Buffers
    reach: NDArray[np.int64]
    sequence: NDArray[np.int64]
    least: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.buffers)

    @cached_property
    def outlives(self) -> NDArray[np.bool_]:
        """bool[n], which are alive at the iteration's end."""
        alive: NDArray[np.bool_] = (self.reach > 0).any(axis=1) & ~self.buffers.persistent
        return alive

    def following_itself(self, number: int) -> Buffers:
        """The buffers on their own circle, as they live where this kind, of this number, follows itself."""
        n = len(self)
        end = np.where(self.outlives, n + self.reach[:, number], np.minimum(self.buffers.end, n))
        return dataclasses.replace(self.buffers, end=end)


class Joint:
    """All kinds on one line.

    Attributes:
        buffers: each buffer of each kind, once for each of the `columns`; where kinds begin alike, of one.
        columns: iterations after which addresses repeat.
        couples: bool of each of `buffers`: it is more than one kind's, or alive while another one's are. All
            others meet those of their own kind and these only.
    """

    couples: NDArray[np.bool_]

    def __init__(self, kinds: Sequence[Kind]) -> None:
        """Lay them out.

        Args:
            kinds: each ``reach`` with a column for each of them, in this order.
        """
        self._kinds = kinds
        self._length = np.array([len(kind) for kind in kinds])
        self.columns = max(_columns(kind, self._length) for kind in kinds)
        count = len(kinds)
        #: Of each kind, how much of its beginning the kind before it matters to.
        self._head = np.array(
            [min(max(int(k.reach[:, j].max(initial=0)) for k in kinds), len(kinds[j])) for j in range(count)]
        )
        if any((kind.reach > self._length).any() for kind in kinds):  # some outlive the next one, whichever
            self._head = self._length.copy()
        span = count * self._head + (self._length - self._head)  # of one column of each kind
        self._begin = np.cumsum(span) - span
        self._span = int(span.sum())
        self._node = _shared_beginnings(kinds)
        self.buffers = self._lay_out()

    def offsets(self, offset: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Of each kind, int64[n, columns]: as `solvers.Plan`.

        Args:
            offset: int64 of each of `buffers`.
        """
        columns = np.arange(self.columns)
        found = []
        for kind, node in zip(self._kinds, self._node, strict=True):
            mine = offset[node[:, None] * self.columns + columns]
            found.append(np.where(kind.buffers.persistent[:, None], -1, mine))
        return found

    def _at(self, before: int, kind: int, column: int) -> int:
        """The time at which the beginning of a kind that follows another lies."""
        return int((column % self.columns) * self._span + self._begin[kind] + before * self._head[kind])

    def _lay_out(self) -> Buffers:
        size = np.zeros((max(int(node.max()) for node in self._node) + 1) * self.columns, np.int64)
        alignment, stream = np.ones_like(size), np.zeros_like(size)
        uses, couples = np.zeros_like(size), np.zeros(len(size), np.bool_)
        pieces = []
        for number, (kind, node) in enumerate(zip(self._kinds, self._node, strict=True)):
            for column in range(self.columns):
                owner = node * self.columns + column
                size[owner] = np.maximum(size[owner], kind.buffers.size)  # where kinds begin alike, and vary
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
        """What each kind has by itself, once for each column, and what that couples is alive meanwhile.

        Yields:
            Rows of `buffers`; the same on a line of the kind's allocations; rows of those that couple, with
            repetitions; and their pieces of lifetime on that line, (start, end). Whatever kind came before is
            there, so what two of these leave alive may overlap.
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
                # The last of the repeated beginnings goes on.
                begin = np.minimum(since[here] // max(head, 1), count - 1) * head
                start = since[here] - begin
                length = self._end[here] - self._start[here]
                yield row[own], line, self._owner[here], (start, start + length)

    def _pieces(self, kind: Kind, number: int, column: int) -> list[Pieces]:
        """(start, end) of every buffer of one column, several times; empty ones among them."""
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
        at = self._at(count - 1, number, column)  # the last one goes on behind the part that matters
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


def agreeing(kinds: Sequence[Kind]) -> list[Kind]:
    """The same, in which what begins alike is placed in all of them or, where one leaves it out, in none."""
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


def _columns(kind: Kind, length: NDArray[np.int64]) -> int:
    """Iterations in a row that need addresses of their own, so that no buffer meets its successor."""
    reach = np.where(kind.outlives[:, None], kind.reach, 0)
    born = np.arange(len(kind))[:, None]
    columns = np.where(reach > born, 2, 1)
    beyond = reach - length
    columns = np.where(beyond > 0, np.where(beyond > born, 3, 2), columns)
    return int(columns.max(initial=1))


def _shared_beginnings(kinds: Sequence[Kind]) -> list[NDArray[np.int64]]:
    """Of each kind's buffers, a number; the same for those of two kinds if all is the same up to there."""
    count = 0
    #: By what came before and the sequence, the ranges of sizes that may follow, each with its number.
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
    """Buffers with these pieces of lifetime, in any order; those without any are of no length."""
    order = np.lexsort((start, owner))
    owner, start, end = owner[order], start[order], end[order]
    axis = (
        int(end.max(initial=0)) + 1
    )  # one after the other, so that the latest end so far is that of the own pieces
    end = np.maximum.accumulate(end + owner * axis) - owner * axis
    first = np.diff(owner, prepend=-1) > 0
    last = np.append(first, True)[1:]
    begin, over = np.zeros_like(size), np.zeros_like(size)
    begin[owner[first]], over[owner[last]] = start[first], end[last]
    gaps = np.stack([owner[1:], end[:-1], start[1:]], axis=1)[~first[1:]]
    return Buffers.of(
        begin, over, size, gaps=gaps[gaps[:, 1] < gaps[:, 2]], alignment=alignment, stream=stream
    )
