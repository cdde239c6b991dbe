"""Placement of a schedule: offsets of buffers on the device, and of copies on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solvers.errors import PlanError
from solvers.packing.check import check
from solvers.packing.solve import solve
from traces.buffers import Buffers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.packing.plan import Plan, Stop
    from solvers.swap.schedule import Schedule
    from solvers.swap.step import Step

#: Alignment of page-locked copies on the host: one page, in bytes.
PAGE = 4096


@dataclass(frozen=True, eq=False)
class Placed:
    """Buffers and their checked plan.

    Attributes:
        buffers: the placed buffers; time is the index of an operation.
        of: int64[n], the row in the step of each buffer or host copy.
        plan: the offsets.
    """

    buffers: Buffers
    of: NDArray[np.int64]
    plan: Plan


def device_buffers(
    step: Step, schedule: Schedule, *, alignment: int = 512
) -> tuple[Buffers, NDArray[np.int64]]:
    """Return each stay of a buffer on the device as a separate buffer, and the row in the step.

    A reload may use another offset. Each stay of a moving persistent buffer lasts from a reload (``fetch``)
    to the next ``release``; a persistent buffer without moves has one stay, the whole step.
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
        late = np.where(schedule.last[rows] < step.start[buffer], k, 0)  # of the previous turn's instance
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
    """Return the last use before each move, counted from the start of the buffer's lifetime."""
    late = schedule.last[rows] < step.start[schedule.buffer[rows]]
    return schedule.last[rows] + np.where(late, len(step), 0)


def host_buffers(
    step: Step, schedule: Schedule, *, alignment: int = PAGE
) -> tuple[Buffers, NDArray[np.int64], NDArray[np.int64]]:
    """Return the host copies of a schedule as buffers, alive from the copy request to the last reload.

    Resting buffers are included, with unlimited lifetime. A copy made once, before this turn, for all moves
    of a buffer has an unlimited lifetime, too.

    Returns:
        The copies, the row in the step of each, and for each move the index of the copy made or used,
        int64[q].
    """
    k, s = len(step), schedule
    start, end = s.out % max(k, 1), s.use + 1 - s.out // max(k, 1) * k
    always = np.setdiff1d(s.buffer, s.buffer[s.copied])
    once = np.array([int((s.buffer == buffer).argmax()) for buffer in always.tolist()], np.int64)
    start[once], end[once] = 0, k
    rows = np.sort(np.concatenate([np.flatnonzero(s.copied), once]))
    which = np.arange(len(s))  # the move whose copy each move uses
    for buffer, row in zip(always.tolist(), once.tolist(), strict=True):
        which[s.buffer == buffer] = row
    for row in np.flatnonzero(~s.copied & ~np.isin(s.buffer, always)).tolist():
        # A reused copy, made by the latest earlier move with a copy, is kept until this reload.
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
    """Return checked plans of the device arena and of the host arena of a schedule.

    Args:
        step: the step.
        schedule: the moves of the step.
        stop: when the solver stops.
        host_limit: most bytes of the host arena.

    Raises:
        PlanError: the host arena takes more than ``host_limit``.
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
