"""AutoSwap's selection and two scheduling methods as published, as a baseline and as a starting point.

Zhang et al., arXiv 1903.06631, after the authors' implementation in SINGA (SwapGPU), without the errors
there. The fixed numbers of events after which a copy may begin there are not needed here, since the end of
each operation is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from solvers.swap.schedule import Schedule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.swap.absences import Absences
    from solvers.swap.link import Link
    from solvers.swap.step import Step


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
    release, fetch = _outs(step, link, away), _ins(step, link, away)
    if limit is not None:
        _stick(step, away, limit, release, fetch)
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


def _outs(step: Step, link: Link, away: Absences) -> NDArray[np.int64]:
    """Return the first operation that begins after each copy out; copies are sequential."""
    order, free, seconds = np.argsort(away.last, kind="stable"), -np.inf, link.out(away.size)
    release = np.empty(len(away), np.int64)
    for turn in range(2 if step.circular else 1):
        free -= step.duration if turn else 0.0
        for row in order.tolist():
            free = max(free, step.begins[away.last[row] + 1]) + seconds[row] + 1e-9
            release[row] = max(_first(step, free), away.last[row] + 1)
    return np.minimum(release, away.use)


def _ins(step: Step, link: Link, away: Absences) -> NDArray[np.int64]:
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


def _stick(
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
