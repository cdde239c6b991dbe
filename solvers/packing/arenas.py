"""Packing into several arenas, laid out in one address space with walls between them and filled one by one.

Arena k begins at ``k * stride_of(capacities)``. Above each arena is a wall: a range of addresses that is
taken all the time, up to the start of the next arena. So every kernel keeps each buffer within one arena, and
a proof for the whole address space is a proof for the arenas.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solvers import _core
from solvers.packing.bounds import peak_load, pieces_of
from solvers.packing.jobs import Jobs
from solvers.packing.options import OPTIONS
from solvers.packing.plan import check_arenas, stride_of
from solvers.packing.registry import search
from solvers.packing.task import Task, run_aside
from traces.columns import distinct, numbered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from traces.buffers import Buffers

#: Solvers that support several arenas; the others support one arena only.
WITH_ARENAS = ("auto", "greedy", "exact")


def arenas_of(capacity: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the capacities of several arenas, or () for a single arena or no capacity.

    Raises:
        ValueError: no capacities, or an impossible capacity.
    """
    if capacity is None or isinstance(capacity, int | np.integer):
        return ()
    arenas = tuple(map(int, capacity))
    check_arenas(arenas)
    return arenas if len(arenas) > 1 else ()


@dataclass(frozen=True)
class Arenas:
    """Several arenas with the bytes that buffers can use in each.

    Attributes:
        capacities: bytes of each arena, as given.
        usable: capacity of each arena, rounded down to a multiple of the greatest common divisor of all sizes
            and alignments; not rounded if there are fixed offsets.
    """

    capacities: tuple[int, ...]
    usable: tuple[int, ...]

    @classmethod
    def for_buffers(cls, capacities: tuple[int, ...], buffers: Buffers) -> Arenas:
        """Return the arenas for these buffers."""
        unit = 1
        taking = pieces_of(buffers).rows
        if len(taking) and not (buffers.offset[taking] >= 0).any():
            coarse = buffers.alignment[taking]
            unit = int(np.gcd.reduce(np.append(buffers.size[taking], coarse[coarse > 1])))
        return cls(capacities, tuple(capacity // unit * unit for capacity in capacities))

    @property
    def stride(self) -> int:
        """Return the distance in bytes between the first bytes of two consecutive arenas."""
        return stride_of(self.capacities)

    @property
    def end(self) -> int:
        """Return the address at which the usable part of the last arena ends."""
        return (len(self.capacities) - 1) * self.stride + self.usable[-1]

    @property
    def walls(self) -> list[tuple[int, int]]:
        """Return the ranges of addresses (from, to) between the arenas."""
        return [
            (k * self.stride + usable, (k + 1) * self.stride) for k, usable in enumerate(self.usable[:-1])
        ]

    def within(self, buffers: Buffers) -> Buffers:
        """Return the buffers with alignments capped at the stride: arena starts are aligned enough."""
        if (buffers.alignment <= self.stride).all():
            return buffers
        return dataclasses.replace(buffers, alignment=np.minimum(buffers.alignment, self.stride))

    def infeasibility(self, buffers: Buffers) -> str:
        """Return why loads or fixed offsets make the arenas infeasible for the buffers, or ""."""
        for least in sorted({0, *self.usable}):
            load = least_load(buffers.select(buffers.size > least))
            if load > (room := sum(usable for usable in self.usable if usable > least)):
                of = f"of buffers larger than {least} bytes " if least else ""
                return f"a load {of}of {load} bytes > {room} usable in {'larger' if least else 'all'} arenas"
        rows = pieces_of(buffers).rows
        rows = rows[buffers.offset[rows] >= 0]
        arena, local = np.divmod(buffers.offset[rows], self.stride)
        usable = np.append(self.usable, 0)[np.minimum(arena, len(self.usable))]
        outside = local + buffers.size[rows] > usable
        if outside.any():
            row = rows[outside.argmax()]
            return f"the fixed offset of buffer {buffers.name(row)} is not within one arena"
        return ""

    def used(self, buffers: Buffers, offset: NDArray[np.int64]) -> int:
        """Return the sum over the arenas of the bytes up to the end of the topmost buffer."""
        rows = pieces_of(buffers).rows
        arena, local = np.divmod(offset[rows], self.stride)
        tops = np.zeros(len(self.capacities), np.int64)
        np.maximum.at(tops, arena, local + buffers.size[rows, None])
        return int(tops.sum())


def least_load(buffers: Buffers) -> int:
    """Return a lower bound in bytes on the sum of all arenas: the sum of the groups' peak loads.

    Padding is not counted, since the topmost buffer of each arena needs none.
    """
    return sum(peak_load(buffers.select(buffers.group == group)) for group in distinct(buffers.group))


def fill_arenas(task: Task, arenas: Arenas) -> None:
    """Fill the arenas one by one, maximum load first; retry with random overestimates until all jobs fit.

    Each turn fills the arenas in the given order and then smallest first, which leaves the larger arenas to
    jobs that fit nowhere else. If the remaining jobs fit the last arena by their load, but filling fails, a
    search follows.
    """
    given = list(range(len(arenas.usable)))
    smallest_first = sorted(given, key=lambda k: arenas.usable[k])
    orders = [given] if smallest_first == given else [given, smallest_first]
    for k, order in enumerate(itertools.islice(itertools.cycle(orders), OPTIONS.fillings * len(orders))):
        turn = k // len(orders)
        if k > 0 and task.budget.reached_limit(check_nodes=turn > 0):
            return
        offsets = _Filling(task, arenas, order, turn).run()
        if offsets is not None:
            task.offer(offsets, int((offsets + task.jobs.size).max()))
            return


class _Filling:
    """One attempt to fill the arenas in a given order."""

    def __init__(self, task: Task, arenas: Arenas, order: list[int], turn: int) -> None:
        self._task, self._arenas, self._order, self._turn = task, arenas, order, turn
        self._seed = (task.seed + turn) % 2**64
        self._offsets = task.jobs.fixed.copy()

    def run(self) -> NDArray[np.int64] | None:
        """Return the offsets of all jobs, or None if some jobs do not fit or a limit was reached."""
        usable = self._arenas.usable
        for n, k in enumerate(self._order):
            room = sum(usable[other] for other in self._order[n:])
            rows = self._rows(k)
            part = _part(self._task.jobs, rows, k * self._arenas.stride)
            offsets = self._fill_one(part, usable[k], room) if len(rows) else np.zeros(0, np.int64)
            if offsets is None:
                return None
            if n + 1 == len(self._order) and (offsets < 0).any():
                offsets = self._search_last(part, usable[k])
            placed = offsets >= 0
            self._offsets[rows[placed]] = offsets[placed] + k * self._arenas.stride
        return self._offsets if (self._offsets >= 0).all() else None

    def _rows(self, arena: int) -> NDArray[np.int64]:
        """Return the jobs without a place and the jobs with a fixed offset in this arena."""
        fixed = self._task.jobs.fixed
        low = arena * self._arenas.stride
        there = (fixed >= low) & (fixed < low + self._arenas.usable[arena])
        return np.flatnonzero(there | (self._offsets < 0))

    def _fill_one(self, part: Jobs, usable: int, room: int) -> NDArray[np.int64] | None:
        order, doubt = (
            np.arange(len(part), dtype=np.int32),
            OPTIONS.filling_noise * self._turn / OPTIONS.fillings,
        )
        offsets = run_aside(
            self._task,
            lambda cancel: _core.pack_below(part.native(), order, usable, room, doubt, self._seed, cancel),
            wait_for_first=False,
        )
        if offsets is None or len(offsets) < len(part):
            return None
        self._task.budget.nodes += OPTIONS.filling_work * len(part)
        return offsets

    def _search_last(self, part: Jobs, usable: int) -> NDArray[np.int64]:
        """Return the offsets of all remaining jobs in the last arena, or -1 for all if none are found."""
        budget = self._task.budget
        if part.lower_bound <= usable and not budget.reached_limit():
            last = Task(part, budget, self._seed, usable, usable, self._task.threads)
            left = (
                OPTIONS.last_arena_nodes
                if budget.nodes_left is None
                else budget.nodes_left // OPTIONS.last_arena_share
            )
            search(last, min(left, OPTIONS.last_arena_nodes >> self._turn))
            if last.offsets is not None and last.arena <= usable:
                return last.offsets
        return np.full(len(part), -1, np.int64)


def _part(jobs: Jobs, rows: NDArray[np.int64], base: int) -> Jobs:
    """Return the jobs in `rows`, with fixed offsets relative to ``base``."""
    chosen = np.zeros(len(jobs), np.bool_)
    chosen[rows] = True
    pieces = np.repeat(chosen, jobs.pieces)
    fixed = jobs.fixed[rows]
    part = Jobs(
        jobs.row[rows],
        jobs.pieces[rows],
        jobs.start[pieces],
        jobs.end[pieces],
        jobs.size[rows],
        jobs.alignment[rows],
        np.where(fixed < 0, -1, fixed - base),
        0,
    )
    return dataclasses.replace(part, lower_bound=_load(part))


def _load(jobs: Jobs) -> int:
    """Return the peak load of the jobs in bytes."""
    size = np.repeat(jobs.size, jobs.pieces)
    times, at = numbered(np.concatenate([jobs.start, jobs.end]))
    change = np.zeros(len(times), np.int64)
    np.add.at(change, at, np.concatenate([size, -size]))
    return int(np.cumsum(change).max(initial=0))
