"""Absences at the peak: live memory that is not accessed while memory is scarcest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from traces import EventType

#: Shortest useful absence, as a fraction of an iteration: a shorter one leaves no time to copy a buffer out
#: and back.
LEAST_ABSENCE = 0.1

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mempool.analysis.peak import Peak
    from traces import Trace


@dataclass(frozen=True, eq=False)
class Absences:
    """Absences of the m buffers alive at the peak, in rows as in `Peak`; times are rows of the trace.

    Attributes:
        last: int64[m], the last access at or before the peak, or the alloc.
        next: int64[m], the next access after the peak, or the free; the length of the trace without either.
        used_again: bool[m], true if ``next`` is an access; else the buffer could have been freed earlier.
    """

    last: NDArray[np.int64]
    next: NDArray[np.int64]
    used_again: NDArray[np.bool_]

    @property
    def length(self) -> NDArray[np.int64]:
        """Return the length of each absence in events, int64[m]."""
        return self.next - self.last

    def late(self, peak: Peak) -> NDArray[np.bool_]:
        """Return which buffers were last used before the peak and could have been freed, bool[m]."""
        late: NDArray[np.bool_] = ~self.used_again & (self.last < peak.event)
        return late

    def away(self, iteration_events: int) -> NDArray[np.bool_]:
        """Return which absences last `LEAST_ABSENCE` of an iteration or longer, bool[m]."""
        away: NDArray[np.bool_] = self.length >= LEAST_ABSENCE * iteration_events
        return away


def absences(trace: Trace, peak: Peak) -> Absences | None:
    """Return the absences around the peak; None if the trace has no accesses and they are unknown."""
    accesses = np.flatnonzero((trace.kind == EventType.READ) | (trace.kind == EventType.WRITE))
    if not len(accesses):
        return None
    # Map from each alloc event to the row of the peak, -1 for others.
    row_of = np.full(len(trace), -1, np.int64)
    row_of[peak.alloc] = np.arange(len(peak.alloc))
    row = row_of[trace.births[accesses]]
    accesses, row = accesses[row >= 0], row[row >= 0]
    before = accesses <= peak.event
    last, following = peak.alloc.copy(), peak.end.copy()
    np.maximum.at(last, row[before], accesses[before])
    np.minimum.at(following, row[~before], accesses[~before])
    return Absences(last, following, following < peak.end)
