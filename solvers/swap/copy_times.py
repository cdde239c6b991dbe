"""Adjustments of copy times in a schedule: later if the host is short, earlier if operations waited."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.swap.link import Link
    from solvers.swap.schedule import Schedule
    from solvers.swap.step import Step


def copied_later(step: Step, link: Link, schedule: Schedule, wait: NDArray[np.float64]) -> Schedule:
    """Request copies to the host as late as lets them end by ``release``: the host then holds fewer at once.

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
            # The last operation that has ended by the latest start of the copy.
            ended = int(np.searchsorted(ends, free - behind * turn_seconds, side="right")) - 1
            latest = ended + behind * k + int(s.release[row]) - at
            out[row] = min(max(latest, int(s.last[row])), int(s.release[row]) - 1)
    return replace(s, out=out)


def fetched_earlier(step: Step, schedule: Schedule, waited: NDArray[np.float64], limit: int) -> Schedule:
    """Request reloads earlier if they were waited for, as far as the limit allows.

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
