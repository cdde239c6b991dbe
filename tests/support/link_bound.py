"""Lower bounds for any planner, from the bytes that cross the link before and after an operation.

Let operation p begin at P and end at Q. Of the buffers away during p, all that were last accessed within t
seconds before P must cross the link in these t seconds, and all that are used within t seconds after Q must
return in them. That holds for each t, for all of p's absences, and for fractions of them. The most bytes that
can be away during p under these constraints are the optimum of a linear program, or of an integer program if
a buffer is away as a whole or not at all. With the seconds waited before and after p as variables, the
program bounds the stall. On a circle, the wait in the part of the turn before p counts for copies out that
begin there and for copies back that end there in the turn after, and is waited once.

For stalls, the larger of this bound and the bound of `fluid_bound` is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from fluid_bound import INTERVALS, fluid_stall_bound

from solvers.swap.absences import absences_of, elapsed_seconds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.swap.absences import Absences
    from solvers.swap.link import Link
    from solvers.swap.step import Step

#: SCIP's limits on a program of whole buffers; at the node limit the best bound so far is valid.
_SCIP_LIMITS = "limits/nodes = 200\nlimits/gap = 0.005"
#: Operations whose linear program is solved: those with the largest bounds by each direction alone.
_OPERATIONS = 12
#: Most absences in one linear program; the smallest ones beyond this number count as away at no cost.
_ABSENCES = 2048
#: Operations whose program of whole buffers is solved, its integer buffers, and the most absences that span
#: such an operation.
_WHOLE_OPERATIONS, _WHOLE_BUFFERS, _WHOLE_ABSENCES = 3, 256, 1024
#: Relative tolerance of that solver, with a margin.
_TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class _Spanning:
    """Absences that span one operation: seconds to leave and to return, and seconds of the copies.

    ``before_turns`` and ``after_turns``: how often the wait in the other part of the turn counts, too.
    """

    size: NDArray[np.int64]
    before: NDArray[np.float64]
    after: NDArray[np.float64]
    out: NDArray[np.float64]
    back: NDArray[np.float64]
    before_turns: NDArray[np.int64]
    after_turns: NDArray[np.int64]
    small_bytes: int


def spanning(step: Step, absences: Absences, op: int) -> NDArray[np.bool_]:
    """Return a mask of the absences that span an operation, bool[q]."""
    later = op + len(step)
    here = (absences.last < op) & (op < absences.use)
    return here | ((absences.last < later) & (later < absences.use))


class LinkBound:
    """Bounds of one step over one link.

    Args:
        step: the step.
        link: the copy times.
        intervals: see `fluid_stall_bound`: four times as many raise the bound of the stall by up to 4 % of
            the step if memory is short for long, and take twenty times as long.
    """

    def __init__(self, step: Step, link: Link, *, intervals: int = INTERVALS) -> None:
        self._intervals = intervals
        step = step.without(step.untouched)  # untouched buffers can be away at no cost
        self._step, self._link = step, link
        self._absences = absences_of(step)
        self._since, self._wraps, self._free = self._copies()

    def peak_bytes(self) -> int:
        """Return a lower bound in bytes on the peak of any schedule without waiting."""
        loads = self._step.load
        left = {op: int(loads[op]) - self._most_away(op) for op in self._hardest_operations()}
        whole = [int(loads[op]) - self._most_away(op, whole=True) for op in self._largest(left)]
        return max((*left.values(), *whole), default=0)

    def stall_seconds(self, limit: int) -> float:
        """Return a lower bound on the stall of any schedule that holds the limit; inf if infeasible."""
        a = self._absences
        if (self._step.load - self._step.spread(a.last + 1, a.use, a.size)).max(initial=0) > limit:
            return float("inf")
        bound = self._bound(limit)
        # An infinite result comes from a solver whose numbers differ too much in magnitude: 0 is a valid
        # bound.
        return bound if bound < float("inf") else 0.0

    def _bound(self, limit: int) -> float:
        hardest = [op for op in self._hardest_operations() if self._step.load[op] > limit]
        needed = {op: int(self._step.load[op]) - limit for op in hardest}
        waits = {op: self._least_wait(op, bytes_of) for op, bytes_of in needed.items()}
        single = max(waits.values(), default=0.0)
        if not hardest or single == float("inf"):
            return single
        single = max([single, *(self._least_wait(op, needed[op], whole=True) for op in self._largest(waits))])
        hardest = [max(waits, key=lambda op: waits[op])]
        parts = fluid_stall_bound(
            self._step,
            self._link,
            self._absences,
            limit,
            intervals=self._intervals,
            isolated=hardest,
        )
        return max(single, parts)

    def _hardest_operations(self) -> list[int]:
        """Return the operations of largest remaining load by the bound of each direction alone."""
        step = self._step
        candidates = np.flatnonzero(step.load > step.peak_bytes // 8)
        if len(candidates) > 512:  # the operation of largest load in each of 512 parts
            parts = np.array_split(candidates, 512)
            candidates = np.array([part[step.load[part].argmax()] for part in parts])
        left = np.array([int(step.load[op]) - self._one_way(op) for op in candidates.tolist()], np.int64)
        order = np.argsort(-left, kind="stable")[:_OPERATIONS]
        return [int(op) for op in candidates[order]]

    def _copies(self) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return how long before each absence the earliest usable copy may begin, in seconds.

        A copy stays valid as long as the buffer is only read. Also return how often a turn begins within
        these seconds, and a mask of the absences that need no copy at all, because nothing ever writes their
        buffers.
        """
        a = self._absences
        free = a.source == np.arange(len(a))
        since, wraps = np.zeros(len(a)), np.zeros(len(a), np.int64)
        for row in np.flatnonzero(~free).tolist():
            here = row
            while (source := int(a.source[here])) >= 0:
                since[row] += float(elapsed_seconds(self._step, a.last[[source]], a.last[[here]])[0])
                since[row] += self._step.duration if a.last[source] > a.last[here] else 0.0
                wraps[row] += a.last[source] > a.last[here]
                here = source
        return since, wraps, free

    def _spanning(self, op: int) -> _Spanning:
        step, a, k = self._step, self._absences, len(self._step)
        rows = np.flatnonzero(spanning(step, a, op))
        large = rows[np.argsort(-a.size[rows], kind="stable")]
        most = _ABSENCES
        small, rows = large[most:], large[:most]
        at = np.where(op > a.last[rows], op, op + k)
        size = a.size[rows]
        return _Spanning(
            size,
            elapsed_seconds(step, a.last[rows] + 1, at) + self._since[rows],
            elapsed_seconds(step, at + 1, a.use[rows]),
            np.where(self._free[rows], 0.0, self._link.out(size)),
            self._link.back(size),
            (at >= k) + self._wraps[rows],
            np.where(a.use[rows] - at + op >= k, 1, 0),
            int(a.size[small].sum()),
        )

    def _one_way(self, op: int) -> int:
        """Return the bytes that can be away by the direction that allows less, ignoring the other."""
        a = self._spanning(op)
        shares = [int(a.size.sum())]
        for room, seconds, per_byte in (
            (a.before, a.out, self._link.out_per_byte),
            (a.after, a.back, self._link.in_per_byte),
        ):
            order = np.argsort(room, kind="stable")
            # In order of room, the copies so far fit the room so far: each prefix bounds the sum.
            rest = np.append(np.cumsum(seconds[order][::-1])[::-1], 0.0)
            fits = min(float((room[order] + rest[1:]).min(initial=np.inf)), float(rest[0]))
            free = int(a.size[seconds == 0.0].sum())
            shares.append(free + int(fits / per_byte) + 1 if per_byte else shares[0])
        return min(shares) + a.small_bytes

    def _largest(self, values: dict[int, Any]) -> list[int]:
        """Return the operations of largest value, to solve the program of whole buffers for."""
        few = [op for op in values if spanning(self._step, self._absences, op).sum() <= _WHOLE_ABSENCES]
        return sorted(few, key=lambda op: -values[op])[:_WHOLE_OPERATIONS]

    def _most_away(self, op: int, *, whole: bool = False) -> int:
        a = self._spanning(op)
        return int(np.ceil(self._program(a, whole=whole).most_bytes())) + a.small_bytes

    def _least_wait(self, op: int, needed: int, *, whole: bool = False) -> float:
        a = self._spanning(op)
        return self._program(a, whole=whole).least_wait(needed - a.small_bytes)

    def _program(self, spanning: _Spanning, *, whole: bool) -> _Program:
        return _Program(spanning, whole_buffers=_WHOLE_BUFFERS if whole else 0)


class _Program:
    """Linear program with a chain of sums for each direction.

    Each of the largest ``whole_buffers`` is away entirely or not at all; if the search reaches the node
    limit before a proof, the solver's best bound is valid all the same.
    """

    def __init__(self, spanning: _Spanning, *, whole_buffers: int) -> None:
        from ortools.linear_solver import pywraplp

        self._whole = whole_buffers > 0
        self._solver: Any = pywraplp.Solver.CreateSolver("SCIP" if self._whole else "GLOP")
        self._unit = max(float(spanning.size.max(initial=1)), 1.0)
        self._all_bytes = float(spanning.size.sum())
        self._away = [self._solver.NumVar(0.0, 1.0, "") for _ in spanning.size]
        if self._whole:
            self._solver.SetSolverSpecificParametersAsString(_SCIP_LIMITS)
            for row in np.argsort(-spanning.size, kind="stable")[:whole_buffers].tolist():
                self._away[row].SetInteger(True)
        self._waits = [self._solver.NumVar(0.0, 0.0, "") for _ in range(2)]
        # Seconds that become 1: the solver errs where coefficients are large, as of copies beside tiny rooms.
        columns = (spanning.before, spanning.after, spanning.out, spanning.back)
        self._scale = max(*(float(seconds.max(initial=0)) for seconds in columns), 1e-9)
        here, there = self._waits
        self._chain(spanning.before, spanning.out, here, there, spanning.before_turns)
        self._chain(spanning.after, spanning.back, there, here, spanning.after_turns)
        self._bytes = self._solver.Sum(
            [float(size) / self._unit * x for size, x in zip(spanning.size, self._away, strict=True)]
        )

    def _chain(
        self,
        room: NDArray[np.float64],
        seconds: NDArray[np.float64],
        wait: Any,
        other: Any,
        turns: NDArray[np.int64],
    ) -> None:
        """Require the copies, sequential in order of room, to fit the room and the wait of each.

        If a room reaches into the other part of the turn, ``other`` counts, too, as often as ``turns`` says.
        """
        solver, infinity, before = self._solver, self._solver.infinity(), None
        order = np.argsort(room, kind="stable")
        reached = np.maximum.accumulate(turns[order]).tolist()
        for row, around in zip(order.tolist(), reached, strict=True):
            total = solver.NumVar(0.0, infinity, "")
            sums = solver.Constraint(0.0, 0.0)
            sums.SetCoefficient(total, -1.0)
            sums.SetCoefficient(self._away[row], float(seconds[row]) / self._scale)
            if before is not None:
                sums.SetCoefficient(before, 1.0)
            fits = solver.Constraint(-infinity, float(room[row]) / self._scale)
            fits.SetCoefficient(total, 1.0)
            fits.SetCoefficient(wait, -float(max(around, 1)))
            fits.SetCoefficient(other, -float(around))
            before = total

    def most_bytes(self) -> float:
        self._solver.Maximize(self._bytes)
        if not self._solve():
            return self._all_bytes  # all bytes is a valid bound
        if self._whole:
            return min(
                float(self._solver.Objective().BestBound()) * (1 + _TOLERANCE) * self._unit, self._all_bytes
            )
        return float(self._solver.Objective().Value()) * self._unit * (1 + 1e-9)

    def least_wait(self, needed: int) -> float:
        for wait in self._waits:
            wait.SetUb(self._solver.infinity())
        self._solver.Add(self._bytes >= needed / self._unit)
        self._solver.Minimize(self._solver.Sum(self._waits))
        if (solved := self._solve()) is not True:
            return float("inf") if solved is False else 0.0
        if self._whole:
            return max(
                (float(self._solver.Objective().BestBound()) * (1 - _TOLERANCE) - _TOLERANCE) * self._scale,
                0.0,
            )
        return max(float(self._solver.Objective().Value()) * self._scale * (1 - 1e-9) - 1e-12, 0.0)

    def _solve(self) -> bool | None:
        """Return True if a solution was found, False if none exists, None if the solver proved neither."""
        status = self._solver.Solve()
        if self._whole:  # infeasibility is left to the linear program
            return True if status in (self._solver.OPTIMAL, self._solver.FEASIBLE) else None
        if status == self._solver.OPTIMAL:
            return True
        return False if status == self._solver.INFEASIBLE else None
