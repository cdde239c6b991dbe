"""Where everything lies once a schedule is made: what stays on the device, and the host's copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solvers.check import check
from solvers.errors import PlanError
from solvers.solve import solve
from traces.buffers import Buffers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.plan import Plan, Stop
    from solvers.swap.schedule import Schedule
    from solvers.swap.step import Step

#: Page-locked copies begin at a page.
PAGE = 4096


@dataclass(frozen=True, eq=False)
class Placed:
    """Buffers and their plan, checked.

    Attributes:
        buffers: what is placed; time is the number of an operation.
        of: int64[n], the row in the step of each buffer, or of each copy on the host.
        plan: where.
    """

    buffers: Buffers
    of: NDArray[np.int64]
    plan: Plan


def device_buffers(
    step: Step, schedule: Schedule, *, alignment: int = 512
) -> tuple[Buffers, NDArray[np.int64]]:
    """Each stay of a buffer on the device as a buffer of its own, and its row in the step.

    A buffer that comes back may lie elsewhere than before. Of a persistent buffer that moves, each stay
    reaches from a fetch to the next release; one that never moves is there always.
    """
    k = len(step)
    start, end, of = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    moved = np.unique(schedule.buffer)
    still = np.setdiff1d(np.arange(len(step.size)), np.concatenate([moved, schedule.resting]))
    start.append(step.start[still])
    end.append(step.end[still])
    of.append(still)
    for buffer in moved.tolist():
        rows = np.flatnonzero(schedule.buffer == buffer)
        rows = rows[np.argsort(_since(step, schedule, rows), kind="stable")]
        late = np.where(schedule.last[rows] < step.start[buffer], k, 0)  # of an instance of the turn before
        gone, back = schedule.release[rows] + late, schedule.fetch[rows] + late
        if step.persistent[buffer]:
            stays = back, np.append(gone[1:], gone[0] + k)
        else:
            stays = np.append(step.start[buffer], back), np.append(gone, step.end[buffer])
        start.append(stays[0])
        end.append(stays[1])
        of.append(np.full(len(stays[0]), buffer))
    first, last, row = np.concatenate(start), np.concatenate(end), np.concatenate(of)
    turn = first // k if step.circular else np.zeros_like(first)
    first, last = first - turn * k, last - turn * k
    size = step.size[row]
    return Buffers.of(first, last, size, alignment=alignment, period=k if step.circular else None), row


def _since(step: Step, schedule: Schedule, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last use before each move, counted from the start of its buffer's lifetime."""
    late = schedule.last[rows] < step.start[schedule.buffer[rows]]
    return schedule.last[rows] + np.where(late, len(step), 0)


def host_buffers(
    step: Step, schedule: Schedule, *, alignment: int = PAGE
) -> tuple[Buffers, NDArray[np.int64], NDArray[np.int64]]:
    """The host's copy of each move that copies, from when it is asked for until it is back at last.

    And what rests, all the time; likewise the row in the step of each.
    Of a buffer whose moves all use a copy that was made once, before this turn, that copy is always there.

    Returns:
        The copies, the row in the step of each, and of each move which of them it makes or uses, int64[q].
    """
    k, s = len(step), schedule
    start, end = s.out % max(k, 1), s.use + 1 - s.out // max(k, 1) * k
    always = np.setdiff1d(s.buffer, s.buffer[s.copied])
    once = np.array([int((s.buffer == buffer).argmax()) for buffer in always.tolist()], np.int64)
    start[once], end[once] = 0, k
    rows = np.sort(np.concatenate([np.flatnonzero(s.copied), once]))
    which = np.arange(len(s))  # whose copy each move has
    for buffer, row in zip(always.tolist(), once.tolist(), strict=True):
        which[s.buffer == buffer] = row
    for row in np.flatnonzero(~s.copied & ~np.isin(s.buffer, always)).tolist():
        # The copy that it uses is kept until then: that of the last move before that made one.
        same = rows[s.buffer[rows] == s.buffer[row]]
        back = (s.last[row] - s.last[same]) % k
        which[row] = source = int(same[back.argmin()])
        until = s.last[source] + int(back.min()) + s.use[row] - s.last[row] + 1
        end[source] = max(end[source], until - s.out[source] // k * k)
    rests = np.zeros(len(s.resting), np.int64)
    return (
        Buffers.of(
            np.concatenate([start[rows], rests]),
            np.concatenate([end[rows], rests + k]),
            np.concatenate([step.size[s.buffer[rows]], step.size[s.resting]]),
            alignment=alignment,
            period=k if step.circular else None,
        ),
        np.concatenate([s.buffer[rows], s.resting]),
        np.searchsorted(rows, which),
    )


def place(
    step: Step, schedule: Schedule, *, stop: Stop | None = None, host_limit: int | None = None
) -> tuple[Placed, Placed]:
    """Plans of the device's arena and of the host's, after the schedule, each checked.

    Args:
        step: the step.
        schedule: its moves.
        stop: when the solver stops.
        host_limit: bytes that the host's arena may take.

    Raises:
        PlanError: the host's arena takes more than ``host_limit``.
    """
    made = []
    for buffers, of in (device_buffers(step, schedule), host_buffers(step, schedule)[:2]):
        plan = solve(buffers, stop=stop)
        check(plan, buffers)
        made.append(Placed(buffers, of, plan))
    if host_limit is not None and made[1].plan.arena_bytes > host_limit:
        taken = made[1].plan.arena_bytes
        what = f"copies take {taken} bytes on the host, more than {host_limit}"
        raise PlanError(f"{what}; a higher limit moves less")
    return made[0], made[1]
