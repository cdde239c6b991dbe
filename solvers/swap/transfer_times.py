"""Changes of the transfer times in a schedule, with the same moved buffers.

`delay_offloads` reduces the copies that the host holds at once, and `advance_reloads` requests reloads
earlier if operations waited. `reduce_fragmentation` searches for a schedule of equal stall with fewer gaps
between placed buffers. Schedules use free memory up to the limit to give copies more time, and a step with a
load always at the limit is hard to place. So the search first shortens each buffer's stay on the device to
the need of its copies, and then places other schedules of equal stall.
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
    from solvers.swap.planner import OffloadPlanner
    from solvers.swap.schedule import PlannedSchedule, Schedule
    from solvers.swap.step import Step

#: Tolerance for rounding of times, in seconds.
_SLACK = 1e-9


def delay_offloads(step: Step, link: Link, schedule: Schedule, wait: NDArray[np.float64]) -> Schedule:
    """Request copies to the host as late as ``release`` permits, so that the host holds fewer at once.

    Args:
        step: the step.
        link: the copy times.
        schedule: the moves; releases and fetches stay the same.
        wait: float64[K], seconds that each operation waits under the schedule.
    """
    k, s = len(step), schedule
    ends = np.cumsum(step.seconds + wait)
    starts, turn_seconds = ends - step.seconds, float(ends[-1]) if k else 0.0
    seconds = np.where(s.copied, link.out(step.size[s.buffer]), 0.0)
    order, free, out = np.argsort(-(s.release % k), kind="stable"), np.inf, s.out.copy()
    for turn in range(2 if step.circular else 1):
        free += turn_seconds if turn else 0.0
        for row in order[s.copied[order]].tolist():
            at = int(s.release[row]) % k
            free = min(free, float(starts[at])) - float(seconds[row]) - 1e-9
            behind = int(free // turn_seconds) if step.circular and turn_seconds else 0
            # The last operation that ends before the latest start of the copy.
            ended = int(np.searchsorted(ends, free - behind * turn_seconds, side="right")) - 1
            latest = ended + behind * k + int(s.release[row]) - at
            out[row] = min(max(latest, int(s.last[row])), int(s.release[row]) - 1)
    return replace(s, out=out)


def advance_reloads(step: Step, schedule: Schedule, waited: NDArray[np.float64], limit: int) -> Schedule:
    """Request reloads with waits earlier, within the limit.

    The rule of Capuchin (Peng et al., ASPLOS 2020, section 4.4): a reload that one iteration waited for is
    requested earlier in the next.

    Args:
        step: the step.
        schedule: the moves.
        waited: float64[q], seconds of waiting for each move's reload.
        limit: most bytes of load; a load that already exceeds this limit does not grow.
    """
    k, s = len(step), schedule
    size, fetch = step.size[s.buffer], s.fetch.copy()
    load = step.load - step.spread(s.release, s.fetch, size)
    for row in np.argsort(s.use, kind="stable").tolist():
        missing = float(waited[row])
        while missing > 0 and fetch[row] - 1 > s.release[row]:
            before = (int(fetch[row]) - 1) % k
            if load[before] + size[row] > limit:
                break
            load[before] += size[row]
            fetch[row] -= 1
            missing -= float(step.seconds[before])
    return replace(s, fetch=fetch)


def reduce_fragmentation(
    planner: OffloadPlanner,
    planned: PlannedSchedule,
    arena: Callable[[Schedule], int],
    *,
    variations: int = 4,
    within: float = 1.02,
    enough: int = 0,
) -> PlannedSchedule:
    """Return the schedule with the smallest arena among those that hold the limit without a longer stall.

    Args:
        planner: the planner that made ``planned``.
        planned: the schedule to start from.
        arena: function that returns the arena in bytes of a plan of the device's addresses.
        variations: number of other schedules considered.
        within: an arena of at most this factor times the peak of ``planned`` ends the search.
        enough: an arena of at most this number of bytes ends the search.
    """
    best, least = planned, arena(planned.schedule)
    for found in _variations(planner, planned, variations):
        if least <= max(within * best.peak_bytes, enough):
            break
        if (taken := arena(found.schedule)) < least:
            best, least = found, taken
    return best


def _variations(
    planner: OffloadPlanner, planned: PlannedSchedule, variations: int
) -> Iterator[PlannedSchedule]:
    """Yield each variation, tightened by each margin."""
    for seed in range(-1, variations):
        variation = planned if seed < 0 else planner.variation(planned, 2 * seed)  # odd seeds start afresh
        if variation is None:
            continue
        for margin in planner.tunables.margins:
            if (tight := tightened(planner, variation, margin)) is not None:
                yield tight


def tightened(planner: OffloadPlanner, planned: PlannedSchedule, margin: float) -> PlannedSchedule | None:
    """Return the schedule after `tighten`, or None if that waits longer or needs more memory."""
    made = tighten(planner.step, planner.link, planned.schedule, planned.replayed.wait, margin=margin)
    replayed = replay(planner.step, planner.link, made)
    if (
        replayed.stall_seconds > planned.stall_seconds * (1 + 1e-9)
        or replayed.peak_bytes > planned.peak_bytes
    ):
        return None
    return replace(planned, schedule=made, replayed=replayed)


def tighten(
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
        release=_earliest_releases(
            step, schedule, np.where(schedule.copied, out, 0.0).tolist(), starts, ends
        ),
        fetch=_latest_fetches(step, schedule, back.tolist(), starts, float(ends[-1])),
    )


def _earliest_releases(
    step: Step, s: Schedule, seconds: list[float], starts: NDArray[np.float64], ends: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return the first operation after each sequential copy out, or the present release if earlier."""
    k, turn = len(step), float(ends[-1])
    done, free = np.empty(len(s)), -np.inf
    order = np.lexsort([s.release, s.out % k]).tolist()
    requested = ends[s.out % k].tolist()
    for behind in (turn, 0.0) if step.circular else (0.0,):
        for row in order:
            end = requested[row] - behind
            if seconds[row]:
                end = free = max(free, end) + seconds[row]
            done[row] = end + _SLACK
    turns = np.floor(done / turn).astype(np.int64) if step.circular else np.zeros(len(s), np.int64)
    first = np.searchsorted(starts, done - turns * turn) + (turns + s.out // k) * k
    result: NDArray[np.int64] = np.minimum(s.release, np.maximum(first, s.out + 1))
    return result


def _latest_fetches(
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
