"""Exact least stall by OR-Tools' CP-SAT, for small steps on a line: shows a planner's optimality gap."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solvers.swap.absences import Absences, absences_of
from solvers.swap.link import Link
from solvers.swap.schedule import Schedule
from solvers.swap.step import Step


class UnprovenError(Exception):
    """No proof within the limits of a solver."""


def least_stall(
    step: Step, link: Link, limit: int, *, ticks: int = 1 << 10, seconds: float = 10.0, early: bool = False
) -> tuple[Schedule, float] | None:
    """Return a schedule that holds the limit and the stall in seconds, minimal in whole ticks.

    Args:
        step: a step on a line.
        link: the copy times.
        limit: bytes.
        ticks: ticks per second; operations are rounded down to whole ticks, copies up.
        seconds: limit of the solver, in its deterministic time: about seconds of an idle machine.
        early: a copy out may begin after the last write to the buffer, while the buffer is still read. Then
            ``out`` of the schedule is the operation after which the copy begins; `replay` refuses such a
            schedule.

    Returns:
        None if no schedule holds the limit, which is proven.

    Raises:
        ValueError: a step on a circle.
        UnprovenError: the solver reached its limit before a proof.
    """
    if step.circular:
        raise ValueError("the oracle knows steps on a line only")
    return _Oracle(step, link, limit, ticks, early=early).solve(seconds)


class _Oracle:
    """Model: start times of operations, the used absences, and start times of their copies; all in ticks."""

    def __init__(self, step: Step, link: Link, limit: int, ticks: int, *, early: bool) -> None:
        from ortools.sat.python import cp_model

        self._cp, self._step, self._ticks = cp_model, step, ticks
        self._a = absences_of(step)
        self._since = _written(step, self._a) if early else self._a.last
        self._takes = np.floor(step.seconds * ticks).astype(int).tolist()
        self._out = np.ceil(link.out(self._a.size) * ticks).astype(int).tolist()
        self._in = np.ceil(link.back(self._a.size) * ticks).astype(int).tolist()
        self._horizon = sum(self._takes) + sum(self._out) + sum(self._in)
        self.model = cp_model.CpModel()
        self._operations()
        self._used = [self.model.new_bool_var("") for _ in range(len(self._a))]
        self._releases: list[dict[int, Any]] = []
        self._fetches: list[dict[int, Any]] = []
        self._begins: list[Any] = []
        engines: tuple[list[Any], list[Any]] = ([], [])
        for row in range(len(self._a)):
            self._absence(row, *engines)
        for engine in engines if link.duplex else (engines[0] + engines[1],):
            self.model.add_no_overlap(engine)
        self._hold(limit)
        self.model.minimize(self._starts[-1])

    def _operations(self) -> None:
        """Add the variables ``ready`` (releases are complete) and ``starts`` (used buffers are back)."""
        k, model = len(self._step), self.model
        self._ready = [model.new_int_var(0, self._horizon, "") for _ in range(k)]
        self._starts = [model.new_int_var(0, self._horizon, "") for _ in range(k)]
        for op in range(k):
            model.add(self._starts[op] >= self._ready[op])
            if op:
                model.add(self._ready[op] >= self._starts[op - 1] + self._takes[op - 1])

    def _absence(self, row: int, outs: list[Any], ins: list[Any]) -> None:
        a, model, used = self._a, self.model, self._used[row]
        last, use = int(a.last[row]), int(a.use[row])
        release = {op: model.new_bool_var("") for op in range(last + 1, use)}
        fetch = {op: model.new_bool_var("") for op in range(last + 2, use + 1)}
        self._releases.append(release)
        self._fetches.append(fetch)
        model.add(sum(release.values()) == used)
        model.add(sum(fetch.values()) == used)
        model.add(sum(op * x for op, x in fetch.items()) >= sum((op + 1) * x for op, x in release.items()))
        copied = self._copied(row)
        out, back = (model.new_int_var(0, self._horizon, "") for _ in range(2))
        self._begins.append(out)
        outs.append(model.new_optional_fixed_size_interval_var(out, self._out[row], copied, ""))
        ins.append(model.new_optional_fixed_size_interval_var(back, self._in[row], used, ""))
        since = int(self._since[row])
        model.add(out >= self._starts[since] + self._takes[since]).only_enforce_if(copied)
        model.add(self._starts[use] >= back + self._in[row]).only_enforce_if(used)
        for op, x in release.items():
            model.add(self._ready[op] >= out + self._out[row]).only_enforce_if(x, copied)
        for op, x in fetch.items():
            model.add(back >= self._ready[op]).only_enforce_if(x)

    def _copied(self, row: int) -> Any:
        """Return the variable of a copy out being made: false if the host's copy is still valid."""
        source = int(self._a.source[row])
        if source < 0:
            return self._used[row]
        copied = self.model.new_bool_var("")
        self.model.add_bool_and(self._used[row], ~self._used[source]).only_enforce_if(copied)
        self.model.add_bool_or(~self._used[row], self._used[source]).only_enforce_if(~copied)
        return copied

    def _hold(self, limit: int) -> None:
        for op, load in enumerate(self._step.load.tolist()):
            if load <= limit:
                continue
            away = [
                int(self._a.size[row]) * x * sign
                for sign, when in ((1, self._releases), (-1, self._fetches))
                for row in range(len(self._a))
                for at, x in when[row].items()
                if at <= op
            ]
            self.model.add(load - sum(away) <= limit)

    def solve(self, seconds: float) -> tuple[Schedule, float] | None:
        solver = self._cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = seconds
        status = solver.solve(self.model)
        if status == self._cp.INFEASIBLE:
            return None
        if status != self._cp.OPTIMAL:
            raise UnprovenError(f"nothing was proven within {seconds} seconds")
        value = solver.value
        stall = (value(self._starts[-1]) + self._takes[-1] - sum(self._takes)) / self._ticks
        rows = [row for row in range(len(self._a)) if value(self._used[row])]
        a = self._a.select(np.array(rows, np.int64))
        release, fetch = (
            np.array([next(op for op, x in when[row].items() if value(x)) for row in rows], np.int64)
            for when in (self._releases, self._fetches)
        )
        sources = self._a.source[rows]
        copied = (sources < 0) | ~np.isin(sources, rows)
        requested = a.last.copy()
        ends = [value(start) + takes for start, takes in zip(self._starts, self._takes, strict=True)]
        order = sorted(range(len(rows)), key=lambda index: value(self._begins[rows[index]]))
        before = 0  # requests keep the order of the copies
        for index in order:
            if copied[index]:
                ended = bisect.bisect_right(ends, value(self._begins[rows[index]])) - 1
                ready = int(self._since[rows[index]])
                before = requested[index] = max(
                    before, ready if ready == a.last[index] else max(ended, ready)
                )
        return Schedule(a.buffer, a.last, requested, release, fetch, a.use, copied), stall


def _written(step: Step, absences: Absences) -> NDArray[np.int64]:
    """Return the last write to the buffer before each absence, or else the first access, as operations."""
    result = absences.last.copy()
    for row, (buffer, last) in enumerate(zip(absences.buffer, absences.last, strict=True)):
        ops = np.flatnonzero((step.access_buffer == buffer) & (step.access_op <= last))
        written = ops[step.access_writes[ops]]
        result[row] = step.access_op[written[-1] if len(written) else ops[0]]
    return result
