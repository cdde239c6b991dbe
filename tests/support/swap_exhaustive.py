"""Every schedule of a tiny step, judged by the replay: an oracle for bounds on the least stall."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.swap import Link, Schedule, Step, replay
from solvers.swap.absences import Absences, absences_of

#: Steps with more schedules are skipped.
MOST_SCHEDULES = 1000


@dataclass(frozen=True)
class Outcomes:
    """The peak in bytes and the stall in seconds of each schedule of a step, int64[s] and float64[s]."""

    peak: NDArray[np.int64]
    stall: NDArray[np.float64]

    def least(self, limit: int) -> float:
        """Return the least stall of the schedules that hold the limit; inf where none does."""
        return float(self.stall[self.peak <= limit].min(initial=np.inf))


def outcomes_of(step: Step, link: Link) -> Outcomes | None:
    """Replay all schedules of a step; None where there are more than `MOST_SCHEDULES`."""
    absences = absences_of(step)
    options = [
        [None, *itertools.combinations(range(last, use + 1), 3)]
        for last, use in zip(absences.last.tolist(), absences.use.tolist(), strict=True)
    ]
    if math.prod(map(len, options)) > MOST_SCHEDULES:
        return None
    judged = [replay(step, link, made) for made in _schedules(step, absences, options)]
    peak = np.array([result.peak_bytes for result in judged])
    return Outcomes(peak, np.array([result.stall_seconds for result in judged]))


def _schedules(
    step: Step, absences: Absences, options: list[list[tuple[int, ...] | None]]
) -> Iterator[Schedule]:
    """Yield the schedule of each choice of out, release and fetch, or of no absence, for each absence."""
    replaced = [_replaced(step, absences, row) for row in range(len(absences))]
    for picked in itertools.product(*options):
        used = np.array([choice is not None for choice in picked], bool)
        copied = np.array([not (used & kept).any() for kept in replaced], bool)[used]
        moves = np.array([choice for choice in picked if choice is not None], np.int64).reshape(-1, 3).T
        a = absences.select(np.flatnonzero(used))
        yield Schedule(a.buffer, a.last, *moves, a.use, copied)


def _replaced(step: Step, absences: Absences, row: int) -> NDArray[np.bool_]:
    """Tell which absences leave a good copy on the host: they ended since the buffer was written last."""
    buffer, last, k = int(absences.buffer[row]), int(absences.last[row]), len(step)
    accesses = np.flatnonzero(step.access_buffer == buffer)
    at = int(np.flatnonzero(step.access_op[accesses] % k == last)[0])
    around = accesses[:at:-1] if step.persistent[buffer] else []
    kept = np.zeros(len(absences), bool)
    for access in (*accesses[at::-1], *around):
        if step.access_writes[access]:
            break
        kept |= (absences.buffer == buffer) & (absences.use % k == step.access_op[access] % k)
    return kept
