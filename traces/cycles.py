"""The iterations of one sequence of allocations, from its sizes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from traces._core import LEAST_EVIDENCE, LEAST_REPEATS, quietest
from traces.detect import Period, tail_period

if TYPE_CHECKING:
    from numpy.typing import NDArray


#: A position whose buffers live longer than this many iterations is left to the fallback.
MOST_ITERATIONS_ALIVE = 16


@dataclass(frozen=True, eq=False)
class Cycle:
    """What one sequence does over and over.

    Attributes:
        rows: int64[m], the sequence's allocations as rows of the trace's, up to the end of the last
            iteration, which may be partial.
        first: index into them at which an iteration begins.
        period: allocations in one.
    """

    rows: NDArray[np.int64]
    first: int
    period: int

    @property
    def starts(self) -> NDArray[np.int64]:
        """Rows at which iterations begin, a partial last one included."""
        return self.rows[self.first :: self.period]

    @property
    def whole(self) -> NDArray[np.int64]:
        """int64[iteration, position], the rows of whole iterations."""
        count = (len(self.rows) - self.first) // self.period
        return self.rows[self.first : self.first + count * self.period].reshape(count, self.period)


class Evidence(NamedTuple):
    """What a stretch must show before it counts as iterations: so many values, and so many periods."""

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
    """The iterations that a sequence ends with, or None if it does not repeat.

    Args:
        rows: of the sequence's allocations among all, in order.
        size: int64[n], bytes, of all allocations.
        freed_before: int64[n], how many allocations came before each one's free; -1 if it was not freed.
        anywhere: the trace is finished: take the longest stretch of iterations in it.
        evidence: what the stretch must show.
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
    """Where iterations may end that a program's last lines follow: near the end densely, then everywhere."""
    near = (n - (1 << power) for power in range(max(n, 1).bit_length()))
    return sorted({n, *near, *(n * sixteenths // 16 for sixteenths in range(16))} - {0}, reverse=True)


def _stretch(values: NDArray[np.int64], cut: int, evidence: Evidence) -> Period | None:
    """The iterations that lead to the cut and go on behind it; None if there are too few."""
    period = tail_period(values[:cut], min_repeats=2)
    if period is None or period.length < max(evidence.values, evidence.repeats * period.period):
        return None
    differs = values[cut:] != values[cut - period.period : len(values) - period.period]
    beyond = int(differs.argmax()) if differs.any() else len(differs)
    return Period(period.period, period.length + beyond, period.start)


def _lifetimes(rows: NDArray[np.int64], freed_before: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of each row, in allocations of the sequence; 0: not freed."""
    gone = freed_before[rows]
    return np.where(gone < 0, 0, np.maximum(np.searchsorted(rows, gone) - np.arange(len(rows)), 1))


def _with_lifetimes(life: NDArray[np.int64], stretch: Period) -> int:
    """The period of the stretch, or a multiple of it where buffers outlive many periods.

    Where few sizes are used over and over, as by a program whose arrays all have one, they say less than what
    lives how long.
    """
    period = stretch.period
    passing = life[life <= stretch.length // (2 * LEAST_REPEATS)]
    longest = int(passing.max(initial=0))
    if longest <= MOST_ITERATIONS_ALIVE * period:
        return period
    seen = life[: len(life) - longest]  # later ones may not be over yet
    repeated = tail_period(seen, min_repeats=2)
    if repeated is None or repeated.length < LEAST_REPEATS * repeated.period:
        return period  # to plan for the longest life of each place would waste memory
    longer = int(np.lcm(period, repeated.period))
    enough = longest <= MOST_ITERATIONS_ALIVE * longer and stretch.length >= LEAST_REPEATS * longer
    return longer if enough else period
