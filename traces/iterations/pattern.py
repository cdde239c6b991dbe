"""The recurring iteration of a trace: the order of allocations and the lifetime of each buffer.

Time inside a pattern counts allocations, not events, since only the allocation that follows a free matters: a
free that moves between the same two allocations changes nothing. For each position, a pattern has the latest
free among the iterations, and the second-latest free, which ignores a buffer that was kept longer only once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from traces._core import align_backwards
from traces.buffers import Buffers
from traces.columns import distinct
from traces.iterations.cycles import MOST_ITERATIONS_ALIVE
from traces.iterations.transitions import reaches, sequence_key
from traces.iterations.windows import Windows, find_windows

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import NDArray

    from traces.trace import Trace

#: A time after every warm-up.
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class WarmUp:
    """The program's allocations before its steady state.

    Attributes:
        sequence: int32[m], the sequence of each allocation, in order.
        size: int64[m], bytes.
        position: int64[m], the corresponding row of the pattern, or -1 for an extra allocation, such as a
            parameter, that must not have a planned address.
        marks: int64[k], number of these allocations before each mark.
    """

    sequence: NDArray[np.int32]
    size: NDArray[np.int64]
    position: NDArray[np.int64]
    marks: NDArray[np.int64]

    def until(self, count: int) -> WarmUp:
        """Return the first ``count`` allocations."""
        return WarmUp(
            self.sequence[:count], self.size[:count], self.position[:count], self.marks[self.marks <= count]
        )


@dataclass(frozen=True, eq=False)
class Pattern:
    """An iteration that occurred at least twice.

    Attributes:
        buffers: n rows in order of allocation, on a circle whose period is n allocations. The fallback serves
            ``persistent`` rows, whose buffers accumulate, live too long, are used by another stream, or
            belong to a varying sequence.
        sequence: int32[n], the sequence (thread and stream) of each allocation, as in the trace's ``thread``.
        since: for each sequence, the number of allocations since the last observed iteration began.
        iterations: number of agreeing iterations among those examined.
        iterations_seen: number of iterations in the recording, including differing ones.
        begins: int64[iterations], rows of the trace at which the agreeing iterations begin; empty if the
            pattern was not made from a trace.
        event: int64[n], row of the trace of each allocation of the last agreeing iteration; empty as
            ``begins``.
        unresolved: number of positions with no observed free that are too young to count as persistent.
        coverage: planned bytes / bytes of all temporary buffers, at the peak of the last iteration.
        warm_up: the allocations before the iterations, or None if the recording does not start with the
            program.
        reach: by the `key` of each pattern that followed this pattern, int64[n]: for each buffer, the largest
            number of the following pattern's allocations before the free. Only for marked iterations.
        lasting: int64[n], the second-latest free of each buffer among the iterations.
        least: int64[n], the least size of each allocation of an envelope (`traces.iterations.envelope`), in
            bytes; ``buffers.size`` has the largest. None: all iterations have the same sizes.
    """

    buffers: Buffers
    sequence: NDArray[np.int32]
    since: dict[int, int]
    iterations: int
    iterations_seen: int
    begins: NDArray[np.int64]
    event: NDArray[np.int64]
    unresolved: int
    coverage: float
    warm_up: WarmUp | None
    reach: Mapping[bytes, NDArray[np.int64]] = field(default_factory=dict)
    lasting: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    least: NDArray[np.int64] | None = None

    @property
    def sizes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The smallest and the largest size of each allocation, int64[n] each."""
        most = self.buffers.size
        return most if self.least is None else self.least, most

    @cached_property
    def key(self) -> bytes:
        """Key shared by patterns with the same sizes in the same order, equal in every process."""
        return sequence_key(self.buffers.size, self.sequence, self.least)


def find_patterns(
    trace: Trace,
    *,
    small_bytes: int = 512,
    whole_recording: bool = True,
    anywhere: bool = False,
    enveloped: Collection[int] | None = None,
    automatic_marks: bool = False,
) -> list[Pattern]:
    """Return the recurring iterations of a trace, the most recent first.

    Marks (events of kind MARK named "step", "begin" or "end") decide where iterations begin; without marks,
    the repeating sequence of sizes at the trace's end decides. At least two iterations must agree.

    Args:
        trace: events in host order; the ``thread`` column names sequences.
        small_bytes: allocations up to this size are left out.
        whole_recording: the trace begins with the program, so the first allocations are a warm-up.
        anywhere: take the longest run of iterations anywhere in a finished trace, since a program does other
            work at its end.
        enveloped: replace marked iterations of many variants that differ in sizes only by their envelope.
            Iterations with one of these allocation counts need to occur only twice. None: find no envelopes.
        automatic_marks: marks of recorders, `traces.trace.AUTOMATIC_MARK`, separate iterations, too.

    Raises:
        TraceError: the trace contradicts itself.
    """
    windows = find_windows(
        trace, small_bytes, anywhere=anywhere, enveloped=enveloped, automatic_marks=automatic_marks
    )
    patterns = [
        _Builder(kind).pattern(reach, whole_recording=whole_recording)
        for kind, reach in zip(windows, reaches(windows), strict=True)
    ]
    return [pattern for pattern in patterns if pattern is not None]


@dataclass(frozen=True, eq=False)
class _Lifetimes:
    life: NDArray[np.int64]  # latest, in the group's allocations
    lasting: NDArray[np.int64]  # second-latest
    unresolved: NDArray[np.bool_]  # never freed, and too young to count as persistent
    keeps: NDArray[np.bool_]  # never or not always freed, or used by another stream


class _Builder:
    """Builder of one pattern from windows."""

    def __init__(self, windows: Windows) -> None:
        self._w = windows
        #: The allocations of the last agreeing window, in merged order.
        self._last = np.arange(*windows.bounds[windows.alike[-1]])
        common = max(windows.groups.values()) + 1
        self._separate = {common + k: s for k, s in enumerate(windows.separate)}  # group -> sequence
        groups = windows.groups | {s: group for group, s in self._separate.items()}
        every = np.arange(int(windows.sequence.max()) + 1)
        #: The group of each allocation; -1 for varying sequences, which are not part of the pattern.
        self._groups = np.array([groups.get(s, -1) for s in every.tolist()], np.int64)[windows.sequence]
        group = self._groups[self._last]
        together = self._last[(group >= 0) & (group < common)]
        # A sequence with separate iterations shares no addresses with other sequences, so the order of its
        # rows among theirs is free.
        self._rows = np.concatenate([together, *(windows.separate[s][-1] for s in self._separate.values())])
        self._group = self._groups[self._rows]
        self._strange: list[int] = []  # allocations in the windows whose buffers persist

    def pattern(self, reach: Mapping[bytes, NDArray[np.int64]], *, whole_recording: bool) -> Pattern | None:
        n = len(self._rows)
        end, lasting = np.zeros((2, n), np.int64)
        stays = np.zeros(n, np.bool_)
        unresolved = 0
        for group in distinct(self._group):
            at = np.flatnonzero(self._group == group)
            lives = self._lifetimes(int(group), len(at))
            for times, life in ((end, lives.life), (lasting, lives.lasting)):
                times[at] = self._merged_time(at, np.arange(len(at)) + np.maximum(life, 1), n)
            unresolved += int(lives.unresolved.sum())
            stays[at] |= lives.keeps | lives.unresolved | (lives.life > MOST_ITERATIONS_ALIVE * len(at))
        end[stays] = lasting[stays] = np.arange(n)[stays] + 1
        if n == 0 or stays.all():
            return None
        buffers = Buffers.of(
            np.arange(n),
            end,
            self._w.size[self._rows],
            group=self._group,
            stream=self._w.stream[self._rows],
            persistent=stays,
            period=n,
        )
        return Pattern(
            buffers=buffers,
            sequence=self._w.sequence[self._rows],
            since=self._w.since(),
            iterations=len(self._w.alike),
            iterations_seen=self._w.count,
            begins=self._w.event[self._w.bounds[list(self._w.alike), 0]],
            event=self._w.event[self._rows],
            unresolved=unresolved,
            coverage=self._coverage(stays),
            warm_up=None if not whole_recording else self._warm_up(buffers),
            reach=reach,
            lasting=lasting,
            least=None if self._w.least is None else self._w.least[self._rows],
        )

    def _lifetimes(self, group: int, count: int) -> _Lifetimes:
        """Return the lifetimes of each position of a group, in allocations of the group."""
        w = self._w
        in_group = self._groups == group
        clock = np.cumsum(in_group)  # the group's allocations up to and including each row
        if group in self._separate:
            rows = w.separate[self._separate[group]]  # [iteration, position]
        else:
            windows = [np.arange(*w.bounds[window]) for window in w.alike]
            rows = np.stack([inside[in_group[inside]] for inside in windows])
        freed_before = w.freed_before[rows]
        is_open = freed_before < 0
        age = clock[np.where(is_open, len(clock), freed_before) - 1] - (clock[rows] - 1)
        life = np.where(is_open, 0, age).max(axis=0)
        # A live instance older than the lifetime of every other instance is no temporary buffer: one such
        # instance is an accident of the warm-up (a parameter of the same size at the same position), several
        # mean that the position is persistent.
        strange = is_open & (age > life + count)
        never = is_open.all(axis=0)
        keeps = ((strange.sum(axis=0) >= 2) & ~never) | (never & (age.max(axis=0) > 4 * count))
        keeps |= w.shared[rows].any(axis=0)  # the other stream's last use is unknown
        if group not in self._separate:
            self._strange.extend(rows[strange & ~never].tolist())
        age[strange] = 0
        longest = age.argmax(axis=0), np.arange(age.shape[1])
        life = age[longest]
        age[longest] = 0
        return _Lifetimes(life, age.max(axis=0), never & ~keeps, keeps)

    def _merged_time(self, at: NDArray[np.int64], own: NDArray[np.int64], n: int) -> NDArray[np.int64]:
        """Convert a count of the group's own allocations to the pattern's time."""
        turn, position = np.divmod(own, len(at))
        merged: NDArray[np.int64] = turn * n + at[position]
        return merged

    def _instances_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the planned rows: common rows of the last window, and all rows of separate sequences."""
        rows, group = self._rows[positions], self._group[positions]
        common = rows[~np.isin(group, list(self._separate))]
        apart = [
            self._w.separate[s][:, positions[group == g] - int(np.flatnonzero(self._group == g)[0])].ravel()
            for g, s in self._separate.items()
        ]
        return np.concatenate([common, *apart])

    def _coverage(self, stays: NDArray[np.bool_]) -> float:
        """Return the planned share of the temporary bytes at the peak of the last agreeing iteration."""
        w, rows = self._w, self._last
        planned = np.isin(rows, self._instances_of(np.flatnonzero(~stays)))
        passing = (w.freed_before[rows] >= 0) | planned
        end = rows[-1] + 1
        free_at = np.where(w.freed_before[rows] < 0, end, np.minimum(w.freed_before[rows], end)) - rows[0]
        size = w.size[rows]

        def load(which: NDArray[np.bool_]) -> NDArray[np.int64]:
            change = np.zeros(len(rows) + 1, np.int64)
            np.add.at(change, np.flatnonzero(which), size[which])
            np.add.at(change, free_at[which], -size[which])
            return np.cumsum(change)

        everything = load(passing)
        peak = int(everything.argmax())
        return float(load(planned)[peak] / everything[peak]) if everything[peak] else 1.0

    def _warm_up(self, buffers: Buffers) -> WarmUp | None:
        """Return the allocations before the steady state, aligned with the pattern; None if they differ.

        The warm-up of an envelope is the program's first iteration, whose sizes may never recur.
        """
        w = self._w
        before = np.arange(
            self._first_steady_row() if w.least is None else w.marks[w.marks >= len(self._rows)][0]
        )
        least = w.size if w.least is None else w.least
        position = np.full(len(before), -1, np.int64)
        when = np.full(len(before), _NEVER, np.int64)
        passing = self._is_passing(before)
        own = w.sequence[self._rows]
        for sequence in w.groups:
            rows = before[(w.sequence[before] == sequence) & passing]
            steady = np.flatnonzero((own == sequence) & ~buffers.persistent)
            most = self._rows[steady]
            position[rows], when[rows] = _aligned(w.size[rows], least[most], w.size[most], steady, len(own))
        if w.least is not None and 2 * (position >= 0).sum() < len(self._rows):
            return None
        position[self._outlives(buffers, before, position, when)] = -1
        return WarmUp(w.sequence[before], w.size[before], position, w.marks[w.marks <= len(before)])

    def _first_steady_row(self) -> int:
        steady_from = max(self._strange, default=-1) + 1
        starts = [int(self._w.bounds[window, 0]) for window in self._w.alike]
        return next((start for start in starts if start >= steady_from), starts[-1])

    def _is_passing(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the buffers that end within 1.5 iterations; others are persistent."""
        freed = self._w.freed_before[rows]
        life = np.where(freed < 0, len(self._w.sequence), freed) - rows
        passing: NDArray[np.bool_] = 2 * life <= 3 * len(self._rows)
        return passing

    def _outlives(
        self,
        buffers: Buffers,
        before: NDArray[np.int64],
        position: NDArray[np.int64],
        when: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Return a mask of the warm-up's buffers that outlive their planned lifetime and would block a slot.

        Time counts allocations of the steady sequence; extra allocations of the warm-up do not advance time.
        """
        n = len(before)
        freed = self._w.freed_before[before]
        following = np.minimum.accumulate(np.append(when, 0)[::-1])[::-1]  # minimum from here on
        gone = np.where(freed < n, following[np.minimum(freed, n)], freed - n)
        planned = np.where(position < 0, 0, buffers.lengths[position])
        outlives: NDArray[np.bool_] = (position >= 0) & ((freed < 0) | (gone - when > planned))
        return outlives


def _aligned(
    sizes: NDArray[np.int64],
    least: NDArray[np.int64],
    most: NDArray[np.int64],
    rows: NDArray[np.int64],
    period: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Align the warm-up with the repeated steady sequence: return row and time of each warm-up allocation.

    The sequence has the sizes from `least` to `most`, in the steady state's `rows`. An allocation without a
    counterpart has row -1. Time counts the steady state's allocations, and is negative before its beginning.
    """
    row, when = np.full(len(sizes), -1), np.full(len(sizes), _NEVER)
    places = align_backwards(sizes, least, most)
    matched = np.flatnonzero(places != _NEVER)
    turn, at = np.divmod(places[matched], max(len(rows), 1))
    row[matched] = rows[at]
    when[matched] = rows[at] + (turn - 1) * period
    return row, when
