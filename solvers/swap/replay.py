"""Judge of offload schedules: replays a schedule in time, without code of the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solvers.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.swap.link import Link
    from solvers.swap.schedule import Schedule
    from solvers.swap.step import Step

#: Most replayed turns of a circle; after so many, the average of the later half is the turn's duration.
_MOST_TURNS = 64
#: Relative difference below which two successive turns count as equal.
_ALIKE = 1e-9
# Events at one operation, in the order in which they are handled.
_RELEASE, _FETCH, _USE, _OUT = range(4)


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """Result of replaying a schedule.

    Attributes:
        load: int64[K], bytes on the device during each operation.
        wait: float64[K], seconds that each operation waits for copies before starting.
        stall_seconds: duration of the step in excess of the sum of the operations.
        iteration_seconds: duration of the step; on a circle, in steady state.
        host_load: int64[K], bytes held on the host during each operation.
        moved_bytes: bytes copied to the host in a step.
        returned_bytes: bytes copied to the device.
    """

    load: NDArray[np.int64]
    wait: NDArray[np.float64]
    stall_seconds: float
    iteration_seconds: float
    host_load: NDArray[np.int64]
    moved_bytes: int
    returned_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device at one time."""
        return int(self.load.max(initial=0))

    @property
    def host_bytes(self) -> int:
        """Most bytes on the host at one time."""
        return int(self.host_load.max(initial=0))


def replay(step: Step, link: Link, schedule: Schedule) -> ReplayResult:
    """Check and replay a schedule: once on a line, on a circle until successive turns are equal.

    Raises:
        PlanError: naming the impossible move: of a buffer that is accessed or not alive meanwhile, a copy
            during an access, two moves at a time, or a release without a host copy.
    """
    earlier = _check(step, schedule)
    size = step.size[schedule.buffer]
    rests = int(step.size[schedule.resting].sum())
    load = step.load - step.spread(schedule.release, schedule.fetch, size) - rests
    wait, duration = _Clock(step, link, schedule).run()
    return ReplayResult(
        load=load,
        wait=wait,
        stall_seconds=max(duration - step.duration, 0.0) if wait.any() or duration > step.duration else 0.0,
        iteration_seconds=duration,
        host_load=step.spread(*_host_intervals(step, schedule, earlier), size) + rests,
        moved_bytes=int(size[schedule.copied].sum()),
        returned_bytes=int(size.sum()),
    )


def _fail(step: Step, schedule: Schedule, wrong: NDArray[np.bool_], what: str) -> None:
    if wrong.any():
        row = int(wrong.argmax())
        raise PlanError(f"move {row} of buffer {step.ids[schedule.buffer[row]]} {what}")


def _check(step: Step, schedule: Schedule) -> NDArray[np.int64]:
    """Raise a PlanError if a move is impossible; return `_valid_copies` of the moves."""
    s, k = schedule, len(step)
    if (
        len(
            {len(getattr(s, name)) for name in ("buffer", "last", "out", "release", "fetch", "use", "copied")}
        )
        > 1
    ):
        raise PlanError("a schedule with columns of different lengths")
    if ((s.buffer < 0) | (s.buffer >= len(step.size))).any():
        raise PlanError("a move of no buffer")
    _fail(step, s, (s.last < 0) | (s.last >= k), "leaves outside of the step")
    _fail(step, s, s.out < s.last, "is copied before its last use")
    _fail(step, s, s.release <= s.out, "is given back before its copy is asked for")
    _fail(step, s, s.fetch <= s.release, "is back before it is away")
    _fail(step, s, s.use < s.fetch, "is used before it is back")
    _fail(step, s, (s.use >= k) if not step.circular else (s.use > s.last + k), "is back after the step")
    before, after = _access_rows(step, s)
    rows = np.lexsort([s.last, s.buffer])
    twice = np.zeros(len(s), np.bool_)
    twice[rows[1:]] = (s.buffer[rows[1:]] == s.buffer[rows[:-1]]) & (s.last[rows[1:]] == s.last[rows[:-1]])
    _fail(step, s, twice, "is made twice")
    earlier = _valid_copies(step, s, before, after)
    _fail(step, s, ~s.copied & (earlier < 0), "is dropped although the host has no copy")
    _check_resting(step, s.resting)
    return earlier


def _check_resting(step: Step, rows: NDArray[np.int64]) -> None:
    """Raise a PlanError unless every resting buffer is persistent, never accessed and listed once."""
    if ((rows < 0) | (rows >= len(step.size))).any():
        raise PlanError("no buffer rests that the step does not have")
    wrong = ~step.persistent[rows] | np.isin(rows, step.access_buffer)
    if wrong.any():
        raise PlanError(f"buffer {step.ids[rows[int(wrong.argmax())]]} rests, and is needed")
    if len(np.unique(rows)) < len(rows):
        raise PlanError("a buffer rests twice")


def _access_rows(step: Step, s: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of each move's accesses at ``last`` and ``use``, consecutive in one lifetime."""
    k, owner, op = len(step), step.access_buffer, step.access_op
    # Add a turn if the access belongs to the previous turn's instance, which began later in its turn.
    turn = np.where(~step.persistent[s.buffer] & (s.last < step.start[s.buffer]), k, 0)
    width = int(max(op.max(initial=0), k)) + k + 1
    key, asked = owner * width + op, s.buffer * width + s.last + turn
    before = np.searchsorted(key, asked)
    low, high = np.searchsorted(owner, [s.buffer, s.buffer + 1])
    found = before < high
    found[found] &= key[before[found]] == asked[found]
    again = found & (before + 1 == high) & step.persistent[s.buffer]
    after = np.where(again, low, before + 1)
    found &= again | (before + 1 < high)
    found[found] &= (op[after[found]] + np.where(again, k, 0)[found]) == (s.use + turn)[found]
    if not found.all():
        row = int(found.argmin())
        what = f"is away from {s.last[row]} to {s.use[row]}, which are not an access and the next"
        raise PlanError(f"move {row} of buffer {step.ids[s.buffer[row]]} {what}")
    return before, after


def _valid_copies(
    step: Step, s: Schedule, before: NDArray[np.int64], after: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for each move the earlier move whose host copy is still valid, or -1, int64[q].

    The earlier move is that of the preceding absence, if there are only reads in between. The copy of a
    persistent buffer may be from the previous turn. ``before`` and ``after`` are the rows of each move's
    accesses.
    """
    returned = np.full(len(step.access_op), -1, np.int64)
    returned[after] = np.arange(len(s))
    returned[step.access_writes] = -1
    ends = step.access_writes | (returned >= 0)
    latest = np.maximum.accumulate(np.where(ends, np.arange(len(ends)), -1))
    low, high = np.searchsorted(step.access_buffer, [s.buffer, s.buffer + 1])
    at = latest[before]
    at = np.where((at < low) & step.persistent[s.buffer], latest[high - 1], at)
    return np.where(at < low, -1, returned[at])


def _host_intervals(
    step: Step, s: Schedule, earlier: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the operations [start, end) in which the host keeps each move's copy."""
    k = max(len(step), 1)
    since = s.last - (s.last - s.use[earlier]) % k + 1  # after the access that ended the earlier move
    start = np.where(s.copied, s.out, since)
    behind = np.where(start < 0, k, 0)
    return start + behind, s.use + 1 + behind


class _Clock:
    """Clock of the compute queue and of one or two copy engines."""

    def __init__(self, step: Step, link: Link, schedule: Schedule) -> None:
        self._step, self._circular = step, step.circular
        size = step.size[schedule.buffer]
        self._out = np.where(schedule.copied, link.out(size), 0.0).tolist()
        self._in = link.back(size).tolist()
        self._duplex = link.duplex
        k = max(len(step), 1)
        s = schedule
        self._events = sorted(
            (op % k, what, first, row, op // k)
            for what, ops, firsts in (
                (_RELEASE, s.release, s.release),
                (_FETCH, s.fetch, s.use),
                (_USE, s.use, s.use),
                (_OUT, s.out, s.release),
            )
            for row, (op, first) in enumerate(zip(ops.tolist(), firsts.tolist(), strict=True))
        )
        # End times of each move's copies in even and in odd turns, as no copy takes more than a turn.
        self._ready = [[[0.0] * len(s) for _ in range(2)] for _ in range(2)]
        self._begins: list[float] = step.begins.tolist()
        self._free = [0.0, 0.0]  # time at which each engine has finished its queue

    def run(self) -> tuple[NDArray[np.float64], float]:
        """Return the waits of the last replayed turn and the duration of a turn."""
        wait, end = self._turn(0, 0.0)
        if not self._circular:
            return wait, end
        least = [sum(self._out), sum(self._in)]
        pace = max(sum(least) if not self._duplex else max(least), self._step.duration)
        ends, duration = [end], end
        for turn in range(1, _MOST_TURNS):
            wait, now = self._turn(turn, ends[-1])
            before, duration = duration, now - ends[-1]
            ends.append(now)
            if abs(duration - before) <= _ALIKE * duration and duration >= pace * (1 - _ALIKE):
                break
        else:  # turns may alternate in length
            duration = (ends[-1] - ends[_MOST_TURNS // 2]) / (_MOST_TURNS - 1 - _MOST_TURNS // 2)
        # Engines that fall behind finally delay every turn.
        return wait, max(duration, pace)

    def _turn(self, turn: int, begin: float) -> tuple[NDArray[np.float64], float]:
        begins, wait = self._begins, [0.0] * (len(self._begins) - 1)
        (out_ready, in_ready), free = self._ready, self._free
        engine = 1 if self._duplex else 0
        late = begin  # accumulated delay
        for op, what, _, row, turns in self._events:
            moved = turn - turns  # turn of the move's beginning
            if moved < 0:
                continue  # complete before the first turn
            if what == _OUT:
                now = begins[op + 1] + late
                if seconds := self._out[row]:
                    now = free[0] = max(free[0], now) + seconds
                out_ready[moved & 1][row] = now
                continue
            now = begins[op] + late
            if what == _FETCH:
                if seconds := self._in[row]:
                    now = free[engine] = max(free[engine], now) + seconds
                in_ready[moved & 1][row] = now
                continue
            ready = (out_ready if what == _RELEASE else in_ready)[moved & 1][row]
            if ready > now:
                wait[op] += ready - now
                late += ready - now
        return np.array(wait), begins[-1] + late
