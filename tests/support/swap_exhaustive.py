"""Every schedule of a tiny step, replayed in time: an oracle for bounds on the least stall, on circles, too.

``python tests/support/swap_exhaustive.py --cases 1000000`` compares the bounds with it on cases drawn from a
seed: none is above the least stall, and none rises where fewer absences are counted.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from swap_steps import step_from

from solvers.swap import Link, LinkBound, Schedule, Step, replay
from solvers.swap.absences import Absences, absences_of
from solvers.swap.fluid_bound import fluid_stall_bound

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


@dataclass(frozen=True)
class Case:
    """A tiny step, a link, a limit between the least that can be held and the peak, and all outcomes."""

    step: Step
    link: Link
    limit: int
    outcomes: Outcomes

    def least_stall(self, claimed: float) -> float:
        """Return the least stall, by the judge of schedules where it seems to be less than is claimed."""
        least = self.outcomes.least(self.limit)
        if claimed <= least + SLACK:
            return least
        made = every_schedule(self.step, self.link)
        holds = (self.outcomes.peak <= self.limit) & (self.outcomes.stall < claimed)
        judged = (replay(self.step, self.link, made(index)) for index in np.flatnonzero(holds).tolist())
        return min(result.stall_seconds for result in judged if result.peak_bytes <= self.limit)


def drawn(random: np.random.Generator) -> Iterator[Case]:
    """Draw cases without end, a few limits of each step."""
    while True:
        step, link = _step(random), _link(random)
        a = absences_of(step)
        floor = int((step.load - step.spread(a.last + 1, a.use, a.size)).max())
        if floor >= step.peak_bytes or (outcomes := outcomes_of(step, link)) is None:
            continue
        limits = random.integers(floor, step.peak_bytes, 8)
        yield from (Case(step, link, limit, outcomes) for limit in np.unique(limits).tolist())


def _step(random: np.random.Generator) -> Step:
    k, circular = int(random.integers(2, 8)), bool(random.random() < 0.4)
    buffers, always = list[tuple[int, list[tuple[int, bool]]]](), set[int]()
    for b in range(int(random.integers(1, 5))):
        stays, wraps = circular and random.random() < 0.5, circular and random.random() < 0.5
        first = int(random.integers(k))
        span = (0, k) if stays else (first, k + (first if wraps else 0))
        ops = np.unique(random.integers(*span, int(random.integers(1, 4))))
        ops -= k * (not stays and ops[0] >= k)
        writes = random.random(len(ops)) < random.choice([0.0, 0.5])
        buffers.append((int(random.integers(1, 9)), list(zip(ops.tolist(), writes.tolist(), strict=True))))
        always |= {b} if stays else set()
    seconds = random.choice([0.25, 0.5, 1.0, 2.0], k).tolist()
    return step_from(seconds, buffers, circular=circular, persistent=always)


def _link(random: np.random.Generator) -> Link:
    fixed, rate = [0.0, 0.0, 0.125, 0.5], [0.0625, 0.125, 0.25, 0.5, 1.0]
    numbers = [float(random.choice(values)) for values in (fixed, rate, fixed, rate)]
    return Link(*numbers, duplex=bool(random.random() < 0.5))


def compare(case: Case, random: np.random.Generator, *, whole: bool) -> None:
    """Assert that bounds keep their order: some absences, all of them, the least stall.

    Args:
        case: the step, the link and the limit.
        random: draws the absences that are counted and how time is cut.
        whole: compare the bound with an interval of one operation, and `LinkBound`, which takes ten times as
            long.
    """
    step, link, limit = case.step, case.link, case.limit
    a, intervals, op = absences_of(step), int(random.integers(1, 5)), int(random.integers(len(step)))
    counted = np.flatnonzero(random.random(len(a)) < random.choice([0.2, 0.5, 0.8]))
    some = fluid_stall_bound(step, link, a, limit, intervals=intervals, counted=counted)
    parts = fluid_stall_bound(step, link, a, limit, intervals=intervals)
    assert some <= parts + SLACK, (case, intervals, counted)
    assert parts <= case.least_stall(parts) + SLACK, (case, intervals)
    if whole:
        alone = fluid_stall_bound(step, link, a, limit, intervals=intervals, isolated=[op])
        assert parts <= alone + SLACK, (case, intervals, op)
        assert alone <= case.least_stall(alone) + SLACK, (case, intervals, op)
        bound = LinkBound(step, link, intervals=intervals)
        stall, peak = bound.stall_seconds(limit), bound.peak_bytes()
        assert stall <= case.least_stall(stall) + SLACK, (case, intervals)
        assert peak <= case.outcomes.peak[case.outcomes.stall < SLACK].min(), (case, peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random, circles = np.random.default_rng(arguments.seed), 0
    for number, case in enumerate(itertools.islice(drawn(random), arguments.cases), 1):
        compare(case, random, whole=number % 20 == 0)
        circles += case.step.circular
        if number % 10_000 == 0:
            print(f"{number:,} cases, {circles:,} on circles: no bound is wrong", flush=True)


if __name__ == "__main__":
    main()
