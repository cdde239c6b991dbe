"""Detection of the iterations of one sequence of allocations, from sizes alone: periods and cycles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from traces._core import LEAST_EVIDENCE, LEAST_REPEATS, least_load_position
from traces._core import tail_period as _tail_period

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Period:
    """A tail of a sequence in which every value equals the value ``period`` positions before.

    Attributes:
        period: values in one iteration.
        length: values in the tail, at least two periods; the last iteration may be partial.
        start: index of the tail's first value.
    """

    period: int
    length: int
    start: int


def tail_period(values: ArrayLike, *, min_repeats: int = 2) -> Period | None:
    """Return the period of the longest repeating tail of a sequence, or None.

    Of all tails that repeat a period at least ``min_repeats`` times, the longest is chosen, and of its
    periods the smallest. A warm-up before the tail and a partial last iteration do not matter, and a nested
    period (A A A in A A A B A A A B) loses once the longer period has the longer tail. Exact, in linear time
    and memory: borders of the reversed sequence by the prefix function of Knuth, Morris and Pratt (1977).

    Args:
        values: int64[n].
        min_repeats: 2 or more.

    Raises:
        ValueError: ``min_repeats`` is less than 2.
        TypeError: values that are not integers.
    """
    if min_repeats < 2:
        raise ValueError("min_repeats is less than 2")
    sequence = np.asarray(values)
    if sequence.size and sequence.dtype.kind not in "iu":
        raise TypeError(f"a sequence of {sequence.dtype}, not of integers")
    sequence = np.ascontiguousarray(sequence.astype(np.int64, copy=False))
    period, length = _tail_period(sequence, min_repeats)
    return Period(period, length, len(sequence) - length) if period else None


#: Longest planned lifetime in iterations: the fallback serves positions with longer-lived buffers.
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
    period = _period_by_lifetimes(_lifetimes(rows[stretch.start :], freed_before), stretch)
    first = stretch.start + least_load_position(rows, values, freed_before[rows], stretch.start, period)
    return Cycle(rows, first, period)


def _cuts(n: int) -> list[int]:
    """Return candidate ends of the iterations in a finished program: dense near the end, sparse before."""
    near = (n - (1 << power) for power in range(max(n, 1).bit_length()))
    return sorted({n, *near, *(n * sixteenths // 16 for sixteenths in range(16))} - {0}, reverse=True)


def _stretch(values: NDArray[np.int64], cut: int, evidence: Evidence) -> Period | None:
    """Return the longest run of iterations around the candidate end `cut`; None if too short."""
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


def _period_by_lifetimes(life: NDArray[np.int64], stretch: Period) -> int:
    """Return the period of the run, or a multiple of the period if buffers outlive many periods.

    If a program uses few distinct sizes, such as one size for all arrays, lifetimes identify iterations
    better than sizes.
    """
    period = stretch.period
    passing = life[life <= stretch.length // (2 * LEAST_REPEATS)]
    longest = int(passing.max(initial=0))
    if longest <= MOST_ITERATIONS_ALIVE * period:
        return period
    seen = life[: len(life) - longest]  # later buffers may still be alive
    repeated = tail_period(seen, min_repeats=2)
    if repeated is None or repeated.length < LEAST_REPEATS * repeated.period:
        return period  # a plan with each position's longest lifetime would waste memory
    longer = int(np.lcm(period, repeated.period))
    enough = longest <= MOST_ITERATIONS_ALIVE * longer and stretch.length >= LEAST_REPEATS * longer
    return longer if enough else period
