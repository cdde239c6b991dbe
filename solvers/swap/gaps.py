"""Search for a schedule of equal stall whose buffers are placed with fewer gaps between them.

A plan fills memory to its limit wherever that gives a copy more time; a step that is full everywhere is
hard to place. So first no buffer stays on the device for longer than its copies need: each is released when
the copy out is done, and fetched as late as the return in time allows. Then other schedules of the same stall
are placed, too.
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
    from solvers.swap.planner import Swap, SwapPlanner
    from solvers.swap.schedule import Schedule
    from solvers.swap.step import Step

#: Factors by which copy times are stretched, the largest first: large margins are preferred if they do as
#: well, for both directions may share a link and no step takes as long as the one before.
_MARGINS = (4.0, 1.25, 1.0)
#: Tolerance for rounding of times, in seconds.
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
    """Return the schedule with the smallest arena among those that hold the limit without a longer stall.

    Args:
        planner: the planner that made ``swap``.
        swap: the swap to start from.
        arena: function that returns the arena in bytes of a plan of the device's addresses.
        variations: number of other schedules considered.
        within: an arena of at most this factor times the swap's peak ends the search.
        enough: an arena of at most so many bytes ends the search.
    """
    best, least = swap, arena(swap.schedule)
    for found in _others(planner, swap, variations):
        if least <= max(within * best.peak_bytes, enough):
            break
        if (taken := arena(found.schedule)) < least:
            best, least = found, taken
    return best


def _others(planner: SwapPlanner, swap: Swap, variations: int) -> Iterator[Swap]:
    """Yield each variation, tightened by each margin."""
    for seed in range(-1, variations):
        one = swap if seed < 0 else planner.varied(swap, 2 * seed)  # odd seeds begin anew
        if one is None:
            continue
        for margin in _MARGINS:
            if (made := _tight(planner, one, margin)) is not None:
                yield made


def _tight(planner: SwapPlanner, swap: Swap, margin: float) -> Swap | None:
    """Return the swap with a `tightened` schedule, or None if that waits longer or needs more memory."""
    made = tightened(planner.step, planner.link, swap.schedule, swap.replayed.wait, margin=margin)
    again = replay(planner.step, planner.link, made)
    if again.stall_seconds > swap.stall_seconds * (1 + 1e-9) or again.peak_bytes > swap.peak_bytes:
        return None
    return replace(swap, schedule=made, replayed=again)


def tightened(
    step: Step, link: Link, schedule: Schedule, wait: NDArray[np.float64], *, margin: float = 1.25
) -> Schedule:
    """Release as early, and fetch as late, as copies allow with some time to spare.

    Args:
        step: the step.
        link: the copy times.
        schedule: the moves; each buffer is then away for longer.
        wait: float64[K], seconds that each operation waits under the schedule.
        margin: factor by which copy times are stretched.
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
    """Return the first operation after each sequential copy out, or the present release if earlier."""
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
    """Return the last operation before each copy back must begin, or the present fetch if later.

    Copies back are sequential.
    """
    k = len(step)
    begins, free = np.empty(len(s)), np.inf
    base = s.fetch // k * k  # of the turn in which the copy is requested
    due = (starts[s.use % k] + turn * ((s.use - base) // k)).tolist()
    order = np.lexsort([s.use, s.fetch % k])[::-1].tolist()
    for ahead in (turn, 0.0) if step.circular else (0.0,):
        for row in order:
            begins[row] = free = min(free, due[row] + ahead) - seconds[row] - _SLACK
    turns = np.floor(begins / turn).astype(np.int64) if step.circular else np.zeros(len(s), np.int64)
    last = np.searchsorted(starts, begins - turns * turn, side="right") - 1 + turns * k + base
    result: NDArray[np.int64] = np.minimum(np.maximum(last, s.fetch), s.use)
    return result
