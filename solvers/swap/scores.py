"""Scores that order absences: the published ones, and our own.

DOA, AOA, WDOA and SWDOA are those of AutoSwap (Zhang et al., arXiv 1903.06631) as the authors' own
implementation in SINGA computes them, without the errors there: DOA subtracts each copy once, WDOA reads the
load at each operation of the absence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from solvers.swap.absences import seconds_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.swap.absences import Absences
    from solvers.swap.link import Link
    from solvers.swap.step import Step

#: Smaller buffers, in bytes, are no candidates of the published planner.
LEAST_PUBLISHED = 1 << 20
#: Most candidates, those of largest bytes times seconds: the time of the score SWDOA grows with their square.
_MOST_PUBLISHED = 2048


def duration(step: Step, absences: Absences) -> NDArray[np.float64]:
    """Return the seconds from the end of the access before to the next access, float64[q]."""
    return seconds_of(step, absences.last + 1, absences.use)


def doa(step: Step, link: Link, absences: Absences) -> NDArray[np.float64]:
    """Return the duration of absence: the seconds that remain after both copies."""
    return duration(step, absences) - link.out(absences.size) - link.back(absences.size)


def aoa(step: Step, link: Link, absences: Absences) -> NDArray[np.float64]:
    """Return the area of absence: DOA times bytes; a negative DOA is divided by the bytes."""
    left = doa(step, link, absences)
    result: NDArray[np.float64] = np.where(left >= 0, left * absences.size, left / absences.size)
    return result


def wdoa(step: Step, absences: Absences, limit: int) -> NDArray[np.float64]:
    """Return the weighted duration of absence: load minus limit, summed over [last, use)."""
    return _sums(step.load.astype(np.float64) - limit, absences, absences.last)


def swdoa_order(step: Step, absences: Absences) -> NDArray[np.int64]:
    """Return the submodular WDOA order: repeatedly take the absence over the largest remaining load.

    The bytes of the taken absence are then subtracted from the load.
    """
    load, k = step.load.astype(np.float64), len(step)
    left = np.ones(len(absences), np.bool_)
    order = np.empty(len(absences), np.int64)
    for turn in range(len(absences)):
        score = np.where(left, _sums(load, absences, absences.last), -np.inf)
        best = order[turn] = int(score.argmax())
        left[best] = False
        ops = np.arange(absences.last[best], absences.use[best]) % k
        load[ops] -= absences.size[best]
    return order


def _sums(values: NDArray[np.float64], absences: Absences, first: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sum of ``values`` over the operations [first, use) of each absence."""
    before = np.concatenate([[0.0], np.cumsum(np.tile(values, 2))])
    result: NDArray[np.float64] = before[absences.use] - before[first]
    return result


def spanning(step: Step, absences: Absences, op: int) -> NDArray[np.bool_]:
    """Return a mask of the absences that span an operation, bool[q]."""
    later = op + len(step)
    here = (absences.last < op) & (op < absences.use)
    return here | ((absences.last < later) & (later < absences.use))


class Published:
    """Candidates of the published planner, best first, under each score and under the sum of ranks.

    Candidates are buffers of a mebibyte and more whose absence spans the peak.
    Of more than 2,048, those of largest bytes times seconds.
    """

    def __init__(self, step: Step, link: Link, absences: Absences) -> None:
        peak = int(step.load.argmax())
        self._rows = np.flatnonzero(spanning(step, absences, peak) & (absences.size >= LEAST_PUBLISHED))
        if len(self._rows) > _MOST_PUBLISHED:
            area = duration(step, absences) * absences.size
            self._rows = np.sort(self._rows[np.argsort(-area[self._rows], kind="stable")[:_MOST_PUBLISHED]])
        self._step, self._few = step, absences.select(self._rows)
        self._doa, self._aoa = doa(step, link, self._few), aoa(step, link, self._few)
        self._swdoa = swdoa_order(step, self._few)

    def orders(self, limit: int) -> dict[str, NDArray[np.int64]]:
        """Return the rows of the candidates, best first, under each score, for a limit in bytes.

        The keys are "doa", "aoa", "wdoa", "swdoa" and "vote".
        """
        scores = {"doa": self._doa, "aoa": self._aoa, "wdoa": wdoa(self._step, self._few, limit)}
        orders = {name: np.argsort(-score, kind="stable") for name, score in scores.items()}
        ranks = np.zeros(len(self._few), np.int64)
        for order in orders.values():
            ranks[order] += np.arange(len(order))
        orders |= {"swdoa": self._swdoa, "vote": np.argsort(ranks, kind="stable")}
        return {name: self._rows[order] for name, order in orders.items()}


def our_orders(step: Step, link: Link, absences: Absences) -> dict[str, NDArray[np.int64]]:
    """Return all absences, best first, under scores of our own.

    ``early``: in order of the last access; the link is then never idle before the peak. ``late``: latest next
    use first, so that the link is never idle after the peak. ``slack``: by the smaller of the time before and
    the time after the peak, each divided by the copy time there. ``size``, ``area`` and ``time``: large ones,
    large ones times duration, and long ones.
    """
    q, peak = absences, int(step.load.argmax())
    seconds, k = duration(step, q), len(step)
    at = np.where(peak > q.last, peak, peak + k)
    out_slack = seconds_of(step, q.last + 1, np.maximum(at, q.last + 1)) / np.maximum(link.out(q.size), 1e-12)
    in_slack = seconds_of(step, np.minimum(at + 1, q.use), q.use) / np.maximum(link.back(q.size), 1e-12)
    keys = {
        "early": q.last,
        "late": -q.use,
        "slack": -np.minimum(out_slack, in_slack),
        "size": -q.size,
        "area": -seconds * q.size,
        "time": -seconds,
    }
    return {name: np.argsort(key, kind="stable") for name, key in keys.items()}
