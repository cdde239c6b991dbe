"""A schedule that costs no more and whose buffers lie with fewer gaps between them.

A plan fills memory to its limit wherever that lets a copy have more time; what is then as full as can be is
hard to place. So first nothing is on the device for longer than its copies need: released when the copy out
is done, fetched as late as it is back in time. Then other schedules of the same stall are placed, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from solvers.swap.replay import replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from solvers.swap.link import Link
    from solvers.swap.plan import Swap, SwapPlanner
    from solvers.swap.schedule import Schedule
    from solvers.swap.step import Step

#: Copies are given so many times the time that they take: much where that does as well, for both ways may
#: share a link and no step takes as long as the one before.
_MARGINS = (4.0, 1.25, 1.0)
#: Rounding of times, seconds.
_SLACK = 1e-9


def packed(
    planner: SwapPlanner,
    swap: Swap,
    arena: Callable[[Schedule], int],
    *,
    variations: int = 4,
    within: float = 1.02,
    enough: int = 0,
) -> Swap:
    """Of schedules that wait no longer and hold the limit the one with the smallest arena.

    Args:
        planner: what planned it.
        swap: what to begin with.
        arena: bytes of a plan of the device's addresses.
        variations: how many other schedules are looked at.
        within: times its peak, an arena that is good enough.
        enough: bytes; so is an arena of no more.
    """
    best, least = swap, arena(swap.schedule)
    for found in _others(planner, swap, variations):
        if least <= max(within * best.peak_bytes, enough):
            break
        if (taken := arena(found.schedule)) < least:
            best, least = found, taken
    return best


def _others(planner: SwapPlanner, swap: Swap, variations: int) -> Iterator[Swap]:
    """Each variation with nothing on the device for longer than needed."""
    for seed in range(-1, variations):
        one = swap if seed < 0 else planner.varied(swap, 2 * seed)  # odd ones begin anew
        if one is None:
            continue
        for margin in _MARGINS:
            if (made := _tight(planner, one, margin)) is not None:
                yield made


def _tight(planner: SwapPlanner, swap: Swap, margin: float) -> Swap | None:
    """`tightened`, judged; None where that waits longer."""
    made = tightened(planner.step, planner.link, swap.schedule, swap.replayed.wait, margin=margin)
    again = replay(planner.step, planner.link, made)
    if again.stall_seconds > swap.stall_seconds * (1 + 1e-9) or again.peak_bytes > swap.peak_bytes:
        return None
    return replace(swap, schedule=made, replayed=again)


def tightened(
    step: Step, link: Link, schedule: Schedule, wait: NDArray[np.float64], *, margin: float = 1.25
) -> Schedule:
    """Releases as soon, and fetches as late, as copies allow with some time to spare.

    Args:
        step: the step.
        link: how long copies take.
        schedule: its moves; what is away is away for longer.
        wait: float64[K], seconds that each operation waits under the schedule.
        margin: how much longer copies are taken to be.
    """
    if not len(schedule) or not step.duration:
        return schedule
    ends = np.cumsum(step.seconds + wait)
    starts, size = ends - step.seconds, step.size[schedule.buffer]
    out, back = (margin * seconds for seconds in (link.out(size), link.back(size)))
    return replace(
        schedule,
        release=_released(step, schedule, np.where(schedule.copied, out, 0.0).tolist(), starts, ends),
        fetch=_fetched(step, schedule, back.tolist(), starts, float(ends[-1])),
    )


def _released(
    step: Step, s: Schedule, seconds: list[float], starts: NDArray[np.float64], ends: NDArray[np.float64]
) -> NDArray[np.int64]:
    """The first operation that begins after each copy out, one after the other, or what it is."""
    k, turn = len(step), float(ends[-1])
    done, free = np.empty(len(s)), -np.inf
    order = np.lexsort([s.release, s.out % k]).tolist()
    asked = ends[s.out % k].tolist()
    for behind in (turn, 0.0) if step.circular else (0.0,):
        for row in order:
            end = asked[row] - behind
            if seconds[row]:
                end = free = max(free, end) + seconds[row]
            done[row] = end + _SLACK
    turns = np.floor(done / turn).astype(np.int64) if step.circular else np.zeros(len(s), np.int64)
    first = np.searchsorted(starts, done - turns * turn) + (turns + s.out // k) * k
    result: NDArray[np.int64] = np.minimum(s.release, np.maximum(first, s.out + 1))
    return result


def _fetched(
    step: Step, s: Schedule, seconds: list[float], starts: NDArray[np.float64], turn: float
) -> NDArray[np.int64]:
    """The last operation before each copy back must begin, one after the other, or what it is."""
    k = len(step)
    begins, free = np.empty(len(s)), np.inf
    base = s.fetch // k * k  # of the turn in which it is asked for
    due = (starts[s.use % k] + turn * ((s.use - base) // k)).tolist()
    order = np.lexsort([s.use, s.fetch % k])[::-1].tolist()
    for ahead in (turn, 0.0) if step.circular else (0.0,):
        for row in order:
            begins[row] = free = min(free, due[row] + ahead) - seconds[row] - _SLACK
    turns = np.floor(begins / turn).astype(np.int64) if step.circular else np.zeros(len(s), np.int64)
    last = np.searchsorted(starts, begins - turns * turn, side="right") - 1 + turns * k + base
    result: NDArray[np.int64] = np.minimum(np.maximum(last, s.fetch), s.use)
    return result
