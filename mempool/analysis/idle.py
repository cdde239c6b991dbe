"""Absences at the peak: memory that nobody touches while it is scarcest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from traces import Kind

#: An absence that is shorter than this part of an iteration is no time to copy a buffer out and back.
LEAST_ABSENCE = 0.1

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mempool.analysis.peak import Peak
    from traces import Trace


@dataclass(frozen=True, eq=False)
class Absences:
    """Of each buffer alive at the peak, m rows as in `Peak`; times are rows of the trace.

    Attributes:
        last: int64[m], the last access at or before the peak, or the alloc.
        next: int64[m], the next access after it, or the free; the length of the trace if there is neither.
        used_again: bool[m], whether ``next`` is an access: if not, the buffer could have been freed before.
    """

    last: NDArray[np.int64]
    next: NDArray[np.int64]
    used_again: NDArray[np.bool_]

    @property
    def length(self) -> NDArray[np.int64]:
        """How long each is not touched, in events, int64[m]."""
        return self.next - self.last

    def late(self, peak: Peak) -> NDArray[np.bool_]:
        """Which were last used before the peak, so that they could have been freed, bool[m]."""
        late: NDArray[np.bool_] = ~self.used_again & (self.last < peak.event)
        return late

    def away(self, iteration_events: int) -> NDArray[np.bool_]:
        """Which are not touched for `LEAST_ABSENCE` of an iteration or more, bool[m]."""
        away: NDArray[np.bool_] = self.length >= LEAST_ABSENCE * iteration_events
        return away


def absences(trace: Trace, peak: Peak) -> Absences | None:
    """Absences around the peak; None where the trace has no accesses, so that nobody knows."""
    accesses = np.flatnonzero((trace.kind == Kind.READ) | (trace.kind == Kind.WRITE))
    if not len(accesses):
        return None
    # One row of the peak for each event of its buffer.
    row_of = np.full(len(trace), -1, np.int64)
    row_of[peak.alloc] = np.arange(len(peak.alloc))
    row = row_of[trace.births[accesses]]
    accesses, row = accesses[row >= 0], row[row >= 0]
    before = accesses <= peak.event
    last, following = peak.alloc.copy(), peak.end.copy()
    np.maximum.at(last, row[before], accesses[before])
    np.minimum.at(following, row[~before], accesses[~before])
    return Absences(last, following, following < peak.end)
