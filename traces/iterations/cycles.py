"""Detection of the iterations of one sequence of allocations, from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from traces._core import LEAST_EVIDENCE, LEAST_REPEATS, quietest
from traces.iterations.detect import Period, tail_period

if TYPE_CHECKING:
    from numpy.typing import NDArray


#: Longest planned lifetime in iterations: a position whose buffers live longer is left to the fallback.
MOST_ITERATIONS_ALIVE = 16


@dataclass(frozen=True, eq=False)
class Cycle:
    """The repeating part of one sequence.

    Attributes:
        rows: int64[m], the sequence's allocations as rows of the trace's allocations, up to the end of the
            last iteration, which may be partial.
        first: index into ``rows`` at which an iteration begins.
        period: allocations per iteration.
    """

    rows: NDArray[np.int64]
    first: int
    period: int

    @property
    def starts(self) -> NDArray[np.int64]:
        """Rows at which iterations begin, including a partial last iteration."""
        return self.rows[self.first :: self.period]

    @property
    def whole(self) -> NDArray[np.int64]:
        """Rows of the whole iterations, int64[iteration, position]."""
        count = (len(self.rows) - self.first) // self.period
        return self.rows[self.first : self.first + count * self.period].reshape(count, self.period)


class Evidence(NamedTuple):
    """The least number of values, and of periods, that a run must have to count as iterations."""

    values: int
    repeats: int


EVIDENCE = Evidence(LEAST_EVIDENCE, LEAST_REPEATS)


def find_cycle(
    rows: NDArray[np.int64],
    size: NDArray[np.int64],
    freed_before: NDArray[np.int64],
    *,
    anywhere: bool,
    evidence: Evidence = EVIDENCE,
) -> Cycle | None:
    """Return the iterations at the end of a sequence, or None if the sequence does not repeat.

    Args:
        rows: the sequence's allocations among all allocations, in order.
        size: int64[n], bytes, of all allocations.
        freed_before: int64[n], number of allocations before each allocation's free; -1 if not freed.
        anywhere: the trace is finished: take the longest run of iterations in the sequence.
        evidence: the least evidence that the run must show.
    """
    values = size[rows]
    cuts = _cuts(len(rows)) if anywhere else [len(rows)]
    found = [one for one in (_stretch(values, cut, evidence) for cut in cuts) if one is not None]
    if not found:
        return None
    stretch = max(found, key=lambda one: one.length)
    rows = rows[: stretch.start + stretch.length]
    values = values[: len(rows)]
    period = _with_lifetimes(_lifetimes(rows[stretch.start :], freed_before), stretch)
    first = stretch.start + quietest(rows, values, freed_before[rows], stretch.start, period)
    return Cycle(rows, first, period)


def _cuts(n: int) -> list[int]:
    """Return candidate ends of the iterations in a finished program: dense near the end, then everywhere."""
    near = (n - (1 << power) for power in range(max(n, 1).bit_length()))
    return sorted({n, *near, *(n * sixteenths // 16 for sixteenths in range(16))} - {0}, reverse=True)


def _stretch(values: NDArray[np.int64], cut: int, evidence: Evidence) -> Period | None:
    """Return the iterations that lead to the cut and continue behind the cut; None if there are too few."""
    period = tail_period(values[:cut], min_repeats=2)
    if period is None or period.length < max(evidence.values, evidence.repeats * period.period):
        return None
    differs = values[cut:] != values[cut - period.period : len(values) - period.period]
    beyond = int(differs.argmax()) if differs.any() else len(differs)
    return Period(period.period, period.length + beyond, period.start)


def _lifetimes(rows: NDArray[np.int64], freed_before: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the lifetime of each row in allocations of the sequence; 0: not freed."""
    gone = freed_before[rows]
    return np.where(gone < 0, 0, np.maximum(np.searchsorted(rows, gone) - np.arange(len(rows)), 1))


def _with_lifetimes(life: NDArray[np.int64], stretch: Period) -> int:
    """Return the period of the run, or a multiple of the period if buffers outlive many periods.

    If a program uses few sizes over and over, such as one size for all arrays, lifetimes identify iterations
    better than sizes do.
    """
    period = stretch.period
    passing = life[life <= stretch.length // (2 * LEAST_REPEATS)]
    longest = int(passing.max(initial=0))
    if longest <= MOST_ITERATIONS_ALIVE * period:
        return period
    seen = life[: len(life) - longest]  # later lifetimes may not be over yet
    repeated = tail_period(seen, min_repeats=2)
    if repeated is None or repeated.length < LEAST_REPEATS * repeated.period:
        return period  # planning for the longest lifetime of each position would waste memory
    longer = int(np.lcm(period, repeated.period))
    enough = longest <= MOST_ITERATIONS_ALIVE * longer and stretch.length >= LEAST_REPEATS * longer
    return longer if enough else period
