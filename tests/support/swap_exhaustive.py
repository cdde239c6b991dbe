"""Every schedule of a tiny step, replayed in time: an oracle for bounds on the least stall."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.swap import Link, Schedule, Step
from solvers.swap.absences import Absences, absences_of

#: Steps with more schedules are skipped.
MOST_SCHEDULES = 4000
#: Turns of a circle; the pace is the mean of the last six, since turns may alternate by two or three.
_TURNS, _LAST = 13, 6
#: Seconds: below the least difference between two sums of the times that are drawn, above their rounding.
SLACK = 1e-5


@dataclass(frozen=True)
class Outcomes:
    """The peak in bytes and the stall in seconds of each schedule of a step, int64[s] and float64[s]."""

    peak: NDArray[np.int64]
    stall: NDArray[np.float64]

    def least(self, limit: int) -> float:
        """Return the least stall of the schedules that hold the limit; inf where none does."""
        return float(self.stall[self.peak <= limit].min(initial=np.inf))


def outcomes_of(step: Step, link: Link) -> Outcomes | None:
    """Replay all schedules of a step at once; None where there are more than `MOST_SCHEDULES`."""
    every = _Every(step, absences_of(step), link)
    return None if every.count > MOST_SCHEDULES else Outcomes(every.peaks(), every.stalls())


def every_schedule(step: Step, link: Link) -> Callable[[int], Schedule]:
    """Return a function that makes the schedule of a row of `outcomes_of`."""
    return _Every(step, absences_of(step), link).schedule


class _Every:
    """All schedules of a step, a row each: columns are absences, -1 where an absence is not used."""

    def __init__(self, step: Step, absences: Absences, link: Link) -> None:
        self.step, self.a, self.link = step, absences, link
        options = [
            [(-1, -1, -1), *itertools.combinations(range(last, use + 1), 3)]
            for last, use in zip(absences.last.tolist(), absences.use.tolist(), strict=True)
        ]
        self.count = int(np.prod([float(len(rows)) for rows in options]))
        if self.count > MOST_SCHEDULES:
            return
        picked = np.array(list(itertools.product(*options)), np.int64).reshape(self.count, len(options), 3)
        self.out, self.release, self.fetch = (np.ascontiguousarray(picked[:, :, j]) for j in range(3))
        self.used = self.out >= 0
        self.copied = self.used & ~self._kept()

    def _kept(self) -> NDArray[np.bool_]:
        """Tell where the host has a good copy: an absence ended since the buffer was written last."""
        step, a, k = self.step, self.a, len(self.step)
        kept = np.zeros_like(self.used)
        for row, (buffer, last) in enumerate(zip(a.buffer.tolist(), a.last.tolist(), strict=True)):
            accesses = np.flatnonzero(step.access_buffer == buffer)
            at = int(np.flatnonzero(step.access_op[accesses] % k == last)[0])
            around = accesses[:at:-1] if step.persistent[buffer] else []
            for access in (*accesses[at::-1], *around):
                if step.access_writes[access]:
                    break
                ended = (a.buffer == buffer) & (a.use % k == step.access_op[access] % k)
                kept[:, row] |= self.used[:, ended].any(axis=1)
        return kept

    def peaks(self) -> NDArray[np.int64]:
        k, load = len(self.step), np.tile(self.step.load, (self.count, 1))
        for row in range(len(self.a)):
            for op in range(int(self.a.last[row]) + 1, int(self.a.use[row])):
                away = (self.release[:, row] <= op) & (op < self.fetch[:, row])
                load[:, op % k] -= np.where(away, self.a.size[row], 0)
        return load.max(axis=1)

    def stalls(self) -> NDArray[np.float64]:
        self._plan()
        duration, turns = self.step.duration, _TURNS if self.step.circular else 1
        self._ready = np.zeros((2, 2, len(self.a), self.count))  # by direction and turn
        self._free = np.zeros((2, self.count))
        late, ends = np.zeros(self.count), [np.zeros(self.count)]
        pace = np.maximum(self._pace(), duration)
        for turn in range(turns):
            late = self._turn(turn, late)
            ends.append(late + duration * (turn + 1))
            if not self.step.circular:
                return late
            same = np.abs(ends[-1] - 2 * ends[-2] + ends[max(turn - 1, 0)]) < SLACK / 100
            if turn and (same & (ends[-1] - ends[-2] >= pace - SLACK / 100)).all():
                return np.maximum(ends[-1] - ends[-2], pace) - duration
        return np.maximum((ends[-1] - ends[-1 - _LAST]) / _LAST, pace) - duration

    def _pace(self) -> NDArray[np.float64]:
        outs = (self.copied * self.link.out(self.a.size)).sum(axis=1)
        ins = (self.used * self.link.back(self.a.size)).sum(axis=1)
        return np.maximum(outs, ins) if self.link.duplex else outs + ins

    def _plan(self) -> None:
        """List the events of each operation, in order: (event, row, turns since the begin, schedules)."""
        k, rows = len(self.step), range(len(self.a))
        by_use = sorted(rows, key=lambda row: (int(self.a.use[row]), row))
        self._events: list[list[tuple[str, int, int, NDArray[np.int64]]]] = [[] for _ in range(k)]
        for event, column, order in (("gone", self.release, rows), ("back", self.fetch, by_use)):
            for row in order:
                for op in np.unique(column[self.used[:, row], row]).tolist():
                    self._events[op % k].append((event, row, op // k, np.flatnonzero(column[:, row] == op)))
        for row in rows:
            use = int(self.a.use[row])
            self._events[use % k].append(("use", row, use // k, np.flatnonzero(self.used[:, row])))
        requests = (
            (release, op, row)
            for row in rows
            for release, op in set(zip(self.release[:, row].tolist(), self.out[:, row].tolist(), strict=True))
        )
        for release, op, row in sorted(request for request in requests if request[0] >= 0):
            which = (self.release[:, row] == release) & (self.out[:, row] == op)
            self._events[op % k].append(("out", row, op // k, np.flatnonzero(which)))

    def _turn(self, turn: int, late: NDArray[np.float64]) -> NDArray[np.float64]:
        begins = self.step.begins + turn * self.step.duration
        outs, ins = self.link.out(self.a.size), self.link.back(self.a.size)
        engine = 1 if self.link.duplex else 0
        late = late.copy()
        for op, events in enumerate(self._events):
            for event, row, turns, which in events:
                moved = turn - turns
                if moved < 0:
                    continue
                out_ready, in_ready = self._ready[0, moved & 1, row], self._ready[1, moved & 1, row]
                if event == "out":
                    now = begins[op + 1] + late[which]
                    copy = self.copied[which, row] & (outs[row] > 0)
                    done = np.maximum(self._free[0, which], now) + outs[row]
                    self._free[0, which] = np.where(copy, done, self._free[0, which])
                    out_ready[which] = np.where(copy, done, now)
                elif event == "back":
                    now = begins[op] + late[which]
                    if ins[row] > 0:
                        now = self._free[engine, which] = (
                            np.maximum(self._free[engine, which], now) + ins[row]
                        )
                    in_ready[which] = now
                else:
                    ready = out_ready if event == "gone" else in_ready
                    late[which] = np.maximum(late[which], ready[which] - begins[op])
        return late

    def schedule(self, index: int) -> Schedule:
        """Return one of the schedules as the planner would write it."""
        rows, a = np.flatnonzero(self.used[index]), self.a
        moves = (column[index, rows] for column in (self.out, self.release, self.fetch))
        return Schedule(a.buffer[rows], a.last[rows], *moves, a.use[rows], self.copied[index, rows])
