"""Bound over the whole step: a linear program in which parts of buffers move at any time.

The step is cut into intervals of about the same time. In each interval, the copies of one direction take no
longer than the operations and the waits of this interval. A copy may be split into parts, made at any time in
the intervals between ``last`` and ``use``. At the operation of largest load of each interval, at least the
load over the limit must be away. Every schedule is a solution of this program, so no schedule waits less than
the optimum. Unlike the bounds of single operations, this bound accounts for memory that is short over a long
time, so that offloaded bytes must cross the link at the pace of the step.

In a large step only some absences are counted; the others are away at no cost. That is a relaxation: the
operations that constrain memory follow from the step's load alone, whichever absences are counted. So
a solution of the program of all absences, with the variables of the others left out, is a solution of the
program of some: the memory required shrinks by the whole size of each absence left out, which is at least
the part that was away, and the remaining copies share the link with fewer. Fewer absences therefore never
raise the bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from solvers.swap.absences import Absences
    from solvers.swap.link import Link
    from solvers.swap.step import Step

#: Least absences that are counted, the largest first, and absences that are counted for each interval.
_ABSENCES, _ABSENCES_EACH = 600, 15
#: Default number of intervals into which the time of the step is cut.
INTERVALS = 24


def fluid_stall_bound(
    step: Step,
    link: Link,
    absences: Absences,
    limit: int,
    *,
    intervals: int = INTERVALS,
    isolated: Sequence[int] = (),
    counted: NDArray[np.int64] | None = None,
) -> float:
    """Return a bound on the least stall of the schedules that hold the limit, in seconds; inf if none can.

    Args:
        step: the step.
        link: the copy times.
        absences: all of the step.
        limit: bytes.
        intervals: number of intervals; more of them usually raise the bound and take longer.
        isolated: operations that form an interval of their own, so that nothing leaves or returns next to
            them.
        counted: rows of the absences whose copies take time; the others are away at no cost. By default the
            largest absences, more of them for more intervals. Counting more absences never lowers the bound.
    """
    if counted is None:
        large = np.argsort(-absences.size, kind="stable")
        most = max(_ABSENCES, _ABSENCES_EACH * intervals)
        counted = np.sort(large[:most])
    return _Fluid(step, link, absences, limit, intervals, isolated, counted).solve()


class _Fluid:
    def __init__(
        self,
        step: Step,
        link: Link,
        absences: Absences,
        limit: int,
        intervals: int,
        isolated: Sequence[int],
        counted: NDArray[np.int64],
    ) -> None:
        from ortools.linear_solver import pywraplp

        self._solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        self._step, self._a, self._rows = step, absences, counted
        even = np.linspace(0.0, step.duration, intervals, endpoint=False)
        cuts = np.minimum(np.searchsorted(step.begins, even), len(step) - 1)
        begins = np.concatenate([[0], cuts, isolated, np.add(isolated, 1)]).astype(np.int64)
        self._first = np.unique(begins[begins < len(step)])
        ends = np.append(self._first[1:], len(step))
        # Use the step's own load, not the load without the uncounted absences: see the module's docstring.
        self._top = np.array([a + step.load[a:b].argmax() for a, b in zip(self._first, ends, strict=True)])
        free = np.setdiff1d(np.arange(len(absences)), counted)
        load = step.load - step.spread(absences.last[free] + 1, absences.use[free], absences.size[free])
        self._unit = float(max(absences.size.max(initial=1), 1))
        self._scale = max(step.duration, 1e-9)
        self._out, self._back = link.out(absences.size) / self._scale, link.back(absences.size) / self._scale
        self._engines(step.begins[ends] - step.begins[self._first], link)
        self._memory = {
            group: self._solver.Constraint((int(load[op]) - limit) / self._unit, self._solver.infinity())
            for group, op in enumerate(self._top.tolist())
            if load[op] > limit
        }
        self._chains()

    def _engines(self, seconds: NDArray[np.float64], link: Link) -> None:
        """Add the constraint that the copies of each direction fit into each interval and the waits there."""
        solver = self._solver
        self._waits = [solver.NumVar(0.0, solver.infinity(), "") for _ in seconds]
        self._outs, self._ins = (
            [solver.Constraint(-solver.infinity(), float(length) / self._scale) for length in seconds]
            for _ in range(2)
        )
        if not link.duplex:
            self._ins = self._outs
        for engine in (self._outs, self._ins) if link.duplex else (self._outs,):
            for fits, wait in zip(engine, self._waits, strict=True):
                fits.SetCoefficient(wait, -1.0)

    def _group(self, op: int) -> int:
        """Return the interval of an operation; both count on into the next turn."""
        turn, within = divmod(op, len(self._step))
        return int(np.searchsorted(self._first, within, side="right")) - 1 + turn * len(self._first)

    def _chains(self) -> None:
        """Add the absences; absences of a buffer without a write between them share one host copy."""
        chains = dict[int, list[tuple[int, int]]]()
        for row in self._rows.tolist():
            if self._a.source[row] == row:  # nothing ever writes the buffer: no copy is ever made
                self._absence(row, None)
                continue
            root = row
            while (source := int(self._a.source[root])) >= 0:
                root = source
            since = int(self._a.last[row] - self._a.last[root]) % len(self._step)
            chains.setdefault(root, []).append((row, since))
        for root, members in chains.items():
            copied, first = self._copied(root, members), int(self._a.last[root])
            for row, since in members:
                self._absence(row, copied[self._group(first + since) - self._group(first) :])

    def _copied(self, root: int, members: list[tuple[int, int]]) -> list[Any]:
        """Return the part of the buffer that the host holds by the end of each interval from ``last`` on."""
        solver, a = self._solver, self._a
        first = self._group(int(a.last[root]))
        spans = [since + int(a.use[row] - a.last[row]) for row, since in members]
        parts: list[Any] = []
        for group in range(first, self._group(int(a.last[root]) + max(spans)) + 1):
            part = solver.NumVar(0.0, 1.0, "")
            engine = self._outs[group % len(self._first)]
            self._add(engine, part, float(self._out[root]))
            if parts:  # parts copied earlier cost nothing again
                self._add(engine, parts[-1], -float(self._out[root]))
                solver.Add(part >= parts[-1])
            parts.append(part)
        return parts

    def _absence(self, row: int, copied: list[Any] | None) -> None:
        solver, infinity, a = self._solver, self._solver.infinity(), self._a
        last, use, k = int(a.last[row]), int(a.use[row]), len(self._step)
        gone = solver.Constraint(-infinity, 1.0)  # at most the whole buffer leaves
        ends = solver.Constraint(0.0, 0.0)  # every part that leaves returns
        before: list[tuple[Any, float]] = []
        for at, group in enumerate(range(self._group(last), self._group(use) + 1)):
            turn, within = divmod(group, len(self._first))
            leaves, returns, away = (solver.NumVar(0.0, 1.0, "") for _ in range(3))
            gone.SetCoefficient(leaves, 1.0)
            ends.SetCoefficient(leaves, 1.0)
            ends.SetCoefficient(returns, -1.0)
            self._add(self._ins[within], returns, float(self._back[row]))
            # A part is away from the interval in which it leaves to the interval in which it returns, both
            # included.
            stays = solver.Constraint(-infinity, 0.0)
            for variable, sign in ((away, 1.0), (leaves, -1.0), *before):
                stays.SetCoefficient(variable, sign)
            if copied is not None:
                held = solver.Constraint(-infinity, 0.0)
                held.SetCoefficient(away, 1.0)
                held.SetCoefficient(copied[at], -1.0)
            if within in self._memory and last < self._top[within] + turn * k < use:
                self._add(self._memory[within], away, float(a.size[row]) / self._unit)
            before = [(away, -1.0), (returns, 1.0)]

    @staticmethod
    def _add(constraint: Any, variable: Any, value: float) -> None:
        constraint.SetCoefficient(variable, constraint.GetCoefficient(variable) + value)

    def solve(self) -> float:
        solver = self._solver
        solver.Minimize(solver.Sum(self._waits))
        status = solver.Solve()
        if status == solver.INFEASIBLE:
            return float("inf")
        if status != solver.OPTIMAL:
            return 0.0  # 0 is a valid bound
        return max(float(solver.Objective().Value()) * (1 - 1e-6) * self._scale - 1e-9 * self._scale, 0.0)
