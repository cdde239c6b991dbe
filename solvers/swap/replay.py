"""The judge of swap schedules: replays one in time. Shares nothing with what plans them."""

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

#: Turns of a circle after which its pace is taken as it is.
_MOST_TURNS = 64
#: Two turns that differ by less, relatively, are alike.
_ALIKE = 1e-9
# What happens at an operation, in this order.
_RELEASE, _FETCH, _USE, _OUT = range(4)


@dataclass(frozen=True, eq=False)
class Replayed:
    """What a schedule does.

    Attributes:
        load: int64[K], bytes on the device during each operation.
        wait: float64[K], seconds that each operation waits for copies before it begins.
        stall_seconds: by how much the step is longer than its operations take.
        iteration_seconds: how long it is; on a circle, in the long run.
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


def replay(step: Step, link: Link, schedule: Schedule) -> Replayed:
    """Check a schedule and replay it: on a line once, on a circle until its turns are alike.

    Raises:
        PlanError: naming the move that no program could make: a buffer away while it is accessed or not
            alive, copied while it is in use, moved twice at a time, dropped although the host has no copy.
    """
    _check(step, schedule)
    size = step.size[schedule.buffer]
    load = step.load - step.spread(schedule.release, schedule.fetch, size)
    wait, duration = _Clock(step, link, schedule).run()
    return Replayed(
        load=load,
        wait=wait,
        stall_seconds=max(duration - step.duration, 0.0) if wait.any() or duration > step.duration else 0.0,
        iteration_seconds=duration,
        host_load=step.spread(*_held(step, schedule), size),
        moved_bytes=int(size[schedule.copied].sum()),
        returned_bytes=int(size.sum()),
    )


def _fail(step: Step, schedule: Schedule, wrong: NDArray[np.bool_], what: str) -> None:
    if wrong.any():
        row = int(wrong.argmax())
        raise PlanError(f"move {row} of buffer {step.ids[schedule.buffer[row]]} {what}")


def _check(step: Step, schedule: Schedule) -> None:
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
    _accessed(step, s)
    rows = np.lexsort([s.last, s.buffer])
    twice = np.zeros(len(s), np.bool_)
    twice[rows[1:]] = (s.buffer[rows[1:]] == s.buffer[rows[:-1]]) & (s.last[rows[1:]] == s.last[rows[:-1]])
    _fail(step, s, twice, "is made twice")
    _fail(step, s, ~s.copied & (_earlier(step, s) < 0), "is dropped although the host has no copy")


def _accessed(step: Step, s: Schedule) -> None:
    """The buffer is accessed at ``last`` and next at ``use``, within one lifetime."""
    k = len(step)
    for row, (buffer, last, use) in enumerate(
        zip(s.buffer.tolist(), s.last.tolist(), s.use.tolist(), strict=True)
    ):
        low, high = np.searchsorted(step.access_buffer, [buffer, buffer + 1])
        ops = step.access_op[low:high]
        if step.persistent[buffer]:
            ops = np.concatenate([ops, ops + k])
        elif last < step.start[buffer]:
            last, use = last + k, use + k  # of an instance of the turn before
        at = int(np.searchsorted(ops, last))
        if not (at + 1 < len(ops) and ops[at] == last and ops[at + 1] == use):
            what = f"is away from {last} to {use}, which are not an access and the next"
            raise PlanError(f"move {row} of buffer {step.ids[buffer]} {what}")


def _earlier(step: Step, s: Schedule) -> NDArray[np.int64]:
    """Of each move the one whose copy on the host is still good when it begins, or -1, int64[q].

    That of the absence before, if only reads lie between. What a persistent buffer that nothing writes needs
    once may come from a turn before.
    """
    k = len(step)
    ids = {(b, u % k): row for row, (b, u) in enumerate(zip(s.buffer.tolist(), s.use.tolist(), strict=True))}
    found = [
        _read_since(step, b, last, ids) for b, last in zip(s.buffer.tolist(), s.last.tolist(), strict=True)
    ]
    return np.array(found, np.int64)


def _held(step: Step, s: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The operations [start, end) in which the host keeps each move's copy."""
    earlier, k = _earlier(step, s), max(len(step), 1)
    since = s.last - (s.last - s.use[earlier]) % k + 1  # after the access that the earlier move ended with
    start = np.where(s.copied, s.out, since)
    behind = np.where(start < 0, k, 0)
    return start + behind, s.use + 1 + behind


def _read_since(step: Step, buffer: int, last: int, returned: dict[tuple[int, int], int]) -> int:
    """The move of the buffer that ended before ``last`` with only reads from there to it, or -1."""
    k = len(step)
    low, high = (int(x) for x in np.searchsorted(step.access_buffer, [buffer, buffer + 1]))
    ops = step.access_op[low:high] % k
    at = low + int(np.flatnonzero(ops == last)[0])
    for back in range(high - low):
        index = at - back
        if index < low:
            if not step.persistent[buffer]:
                return -1
            index += high - low
        if step.access_writes[index]:
            return -1
        if (row := returned.get((buffer, int(step.access_op[index]) % k))) is not None:
            return row
    return -1


class _Clock:
    """Compute and two copy engines, or one."""

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
        self._out_ready: dict[tuple[int, int], float] = {}
        self._in_ready: dict[tuple[int, int], float] = {}
        self._free = [0.0, 0.0]  # when each engine has done all that it was asked for

    def run(self) -> tuple[NDArray[np.float64], float]:
        """Waits of the last turn that was replayed, and how long it was."""
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
        else:  # they may alternate
            duration = (ends[-1] - ends[_MOST_TURNS // 2]) / (_MOST_TURNS - 1 - _MOST_TURNS // 2)
        # Engines that fall behind hold everybody up in the end, however many turns that takes.
        return wait, max(duration, pace)

    def _turn(self, turn: int, begin: float) -> tuple[NDArray[np.float64], float]:
        begins, wait = self._step.begins, np.zeros(len(self._step))
        late = begin  # how far behind the operations' own times
        for op, what, _, row, turns in self._events:
            moved = turn - turns  # the turn in which the move began
            now = float(begins[op]) + late
            if what == _OUT:
                now = float(begins[op + 1]) + late
                if moved >= 0:
                    self._out_ready[row, moved] = self._copy(0, now, self._out[row])
                continue
            if moved < 0:
                continue  # of before the first turn: done
            if what == _FETCH:
                self._in_ready[row, moved] = self._copy(1, now, self._in[row])
                continue
            ready = (self._out_ready if what == _RELEASE else self._in_ready).pop((row, moved), now)
            if ready > now:
                wait[op] += ready - now
                late += ready - now
        return wait, float(begins[-1]) + late

    def _copy(self, engine: int, now: float, seconds: float) -> float:
        engine = engine if self._duplex else 0
        if seconds == 0.0:
            return now
        self._free[engine] = max(self._free[engine], now) + seconds
        return self._free[engine]
