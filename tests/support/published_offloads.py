"""AutoSwap's scores, selection and scheduling as published: a baseline for offload schedules.

Zhang et al., arXiv 1903.06631, after the authors' implementation in SINGA (SwapGPU), without the errors
there: DOA subtracts each copy once, WDOA reads the load at each operation of the absence. The fixed numbers
    of events
after which a copy may begin there are not needed here, since the end of each operation is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from solvers.swap import ReplayResult, Schedule, replay
from solvers.swap.absences import absences_of, idle_seconds, spanning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from solvers.swap import Link, Step
    from solvers.swap.absences import Absences

#: Smaller buffers, in bytes, are no candidates.
LEAST_BYTES = 1 << 20
#: Most candidates, those of largest bytes times seconds: the time of the score SWDOA grows with their square.
_MOST_CANDIDATES = 2048


class PublishedPlanner:
    """The published planner of one step over one link.

    Candidates are buffers of a mebibyte and more whose absence spans the peak.
    """

    def __init__(self, step: Step, link: Link) -> None:
        self.step, self.link, self.absences = step, link, absences_of(step)
        a = self.absences
        self._rows = np.flatnonzero(spanning(step, a, int(step.load.argmax())) & (a.size >= LEAST_BYTES))
        if len(self._rows) > _MOST_CANDIDATES:
            area = idle_seconds(step, a) * a.size
            self._rows = np.sort(self._rows[np.argsort(-area[self._rows], kind="stable")[:_MOST_CANDIDATES]])
        self._candidates = a.select(self._rows)
        self._swdoa = swdoa_order(step, self._candidates)

    def orders(self, limit: int) -> dict[str, NDArray[np.int64]]:
        """Return the rows of the candidates, best first, by each score and by the sum of their ranks."""
        few, link = self._candidates, self.link
        scores = {"doa": doa(self.step, link, few), "aoa": aoa(self.step, link, few)}
        scores["wdoa"] = wdoa(self.step, few, limit)
        orders = {name: np.argsort(-score, kind="stable") for name, score in scores.items()}
        ranks = np.zeros(len(few), np.int64)
        for order in orders.values():
            ranks[order] += np.arange(len(order))
        orders |= {"swdoa": self._swdoa, "vote": np.argsort(ranks, kind="stable")}
        return {name: self._rows[order] for name, order in orders.items()}

    def schedules(self, limit: int, *, stall: bool = True) -> Iterator[tuple[str, Schedule]]:
        """Yield the name of each score and its schedule; the load may exceed the limit.

        Without ``stall``, moves are scheduled so as to avoid waiting.
        """
        for name, order in self.orders(limit).items():
            rows = selected(self.step, self.absences, order, limit)
            window = limit if stall else None
            yield name, scheduled(self.step, self.link, self.absences, rows, window)

    def hold(self, limit: int) -> tuple[str, ReplayResult] | None:
        """Return the best score and its result among those that hold the limit."""
        judged = [(name, replay(self.step, self.link, s)) for name, s in self.schedules(limit)]
        holds = [(name, result) for name, result in judged if result.peak_bytes <= limit]
        return min(holds, key=lambda pair: pair[1].stall_seconds, default=None)

    def least_peak_without_stall(self) -> int:
        """Return the least peak without stall, of limits from 95 % down to half of the peak."""
        best = self.step.peak_bytes
        for limit in (best * np.arange(19, 9, -1) // 20).tolist():
            for _, schedule in self.schedules(limit, stall=False):
                result = replay(self.step, self.link, schedule)
                if result.stall_seconds == 0:
                    best = min(best, result.peak_bytes)
        return best


def doa(step: Step, link: Link, absences: Absences) -> NDArray[np.float64]:
    """Return the duration of absence: the seconds that remain after both copies."""
    return idle_seconds(step, absences) - link.out(absences.size) - link.back(absences.size)


def aoa(step: Step, link: Link, absences: Absences) -> NDArray[np.float64]:
    """Return the area of absence: DOA times bytes; a negative DOA is divided by the bytes."""
    left = doa(step, link, absences)
    result: NDArray[np.float64] = np.where(left >= 0, left * absences.size, left / absences.size)
    return result


def wdoa(step: Step, absences: Absences, limit: int) -> NDArray[np.float64]:
    """Return the weighted duration of absence: load minus limit, summed over [last, use)."""
    return _sums(step.load.astype(np.float64) - limit, absences)


def swdoa_order(step: Step, absences: Absences) -> NDArray[np.int64]:
    """Return the submodular WDOA order: repeatedly take the absence over the largest remaining load.

    The bytes of the taken absence are then subtracted from the load.
    """
    load, k = step.load.astype(np.float64), len(step)
    left = np.ones(len(absences), np.bool_)
    order = np.empty(len(absences), np.int64)
    for turn in range(len(absences)):
        score = np.where(left, _sums(load, absences), -np.inf)
        best = order[turn] = int(score.argmax())
        left[best] = False
        ops = np.arange(absences.last[best], absences.use[best]) % k
        load[ops] -= absences.size[best]
    return order


def _sums(values: NDArray[np.float64], absences: Absences) -> NDArray[np.float64]:
    """Return the sum of ``values`` over the operations [last, use) of each absence."""
    before = np.concatenate([[0.0], np.cumsum(np.tile(values, 2))])
    result: NDArray[np.float64] = before[absences.use] - before[absences.last]
    return result


def selected(step: Step, absences: Absences, order: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Select absences in this order until the load is within the limit, as if copies took no time."""
    load, taken = step.load.copy(), list[int]()
    for row in order.tolist():
        if load.max(initial=0) <= limit:
            break
        load[np.arange(absences.last[row] + 1, absences.use[row]) % len(step)] -= absences.size[row]
        taken.append(row)
    return np.array(taken, np.int64)


def scheduled(
    step: Step, link: Link, absences: Absences, rows: NDArray[np.int64], limit: int | None
) -> Schedule:
    """Schedule the beginning and end of the selected absences.

    Args:
        step: the step.
        link: the copy times.
        absences: all absences, of which ``rows`` are taken; all of those span the peak.
        rows: int64[r].
        limit: bytes to hold, at the cost of waiting; None to avoid waiting.
    """
    away = absences.select(rows)
    release, fetch = _releases(step, link, away), _fetches(step, link, away)
    if limit is not None:
        _limit_window(step, away, limit, release, fetch)
    keep = np.flatnonzero(release < fetch)
    keep = keep[np.argsort(away.use[keep], kind="stable")]
    return Schedule(
        away.buffer[keep],
        away.last[keep],
        away.last[keep],
        release[keep],
        fetch[keep],
        away.use[keep],
        np.ones(len(keep), np.bool_),
    )


def _releases(step: Step, link: Link, away: Absences) -> NDArray[np.int64]:
    """Return the first operation that begins after each copy out; copies are sequential."""
    order, free, seconds = np.argsort(away.last, kind="stable"), -np.inf, link.out(away.size)
    release = np.empty(len(away), np.int64)
    for turn in range(2 if step.circular else 1):
        free -= step.duration if turn else 0.0
        for row in order.tolist():
            free = max(free, step.begins[away.last[row] + 1]) + seconds[row] + 1e-9
            release[row] = max(_first(step, free), away.last[row] + 1)
    return np.minimum(release, away.use)


def _fetches(step: Step, link: Link, away: Absences) -> NDArray[np.int64]:
    """Return the last operation that begins before each copy back must.

    Each copy back ends before ``use`` and before the next copy back begins.
    """
    k = len(step)
    order, free, seconds = np.argsort(-(away.use % k), kind="stable"), np.inf, link.back(away.size)
    fetch = np.empty(len(away), np.int64)
    for turn in range(2 if step.circular else 1):
        free += step.duration if turn else 0.0
        for row in order.tolist():
            use = away.use[row] % k
            free = min(free, step.begins[use]) - seconds[row] - 1e-9
            fetch[row] = max(_last(step, free) + away.use[row] - use, away.last[row] + 1)
    return fetch


def _first(step: Step, at: float) -> int:
    turn = int(at // step.duration) if step.circular else 0
    return int(np.searchsorted(step.begins[:-1], at - turn * step.duration)) + turn * len(step)


def _last(step: Step, at: float) -> int:
    turn = int(at // step.duration) if step.circular else 0
    return (
        int(np.searchsorted(step.begins[:-1], at - turn * step.duration, side="right")) - 1 + turn * len(step)
    )


def _limit_window(
    step: Step, away: Absences, limit: int, release: NDArray[np.int64], fetch: NDArray[np.int64]
) -> None:
    """Limit the schedule to the published window around the peak, and to the memory limit.

    Copies out end by the peak or when the load exceeds the limit; copies back begin after both.
    """
    k, peak = len(step), int(step.load.argmax())
    at = np.where(peak > away.last, peak, peak + k)
    np.minimum(release, at, out=release)
    np.maximum(fetch, at + 1, out=fetch)
    load = step.load - step.spread(away.last + 1, away.use, away.size)
    for row in np.argsort(away.last, kind="stable").tolist():
        pending = np.arange(away.last[row] + 1, release[row])
        over = np.flatnonzero(load[pending % k] + away.size[row] > limit)
        release[row] = pending[over[0]] if len(over) else release[row]
        load[np.arange(away.last[row] + 1, release[row]) % k] += away.size[row]
    for row in np.argsort(-away.use, kind="stable").tolist():
        back = np.arange(fetch[row], away.use[row])
        over = np.flatnonzero(load[back % k] + away.size[row] > limit)
        fetch[row] = back[over[-1]] + 1 if len(over) else fetch[row]
        load[np.arange(fetch[row], away.use[row]) % k] += away.size[row]
