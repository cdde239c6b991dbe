"""Next use of each buffer of a recorded iteration."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from solvers.swap import Step


class Uses:
    """Accesses of a step on a circle, by row of the buffer."""

    def __init__(self, step: Step) -> None:
        """Index the accesses of a step."""
        self._turn = len(step)
        parts = np.searchsorted(step.access_buffer, np.arange(1, len(step.size)))
        self._accesses: list[list[int]] = [part.tolist() for part in np.split(step.access_op, parts)]
        self._end: list[int] = step.end.tolist()
        self._stays: list[bool] = step.persistent.tolist()

    def until(self, row: int, at: int) -> int:
        """Return the number of operations from operation `at` to the buffer's next use.

        For a buffer without a further use, return twice the remaining lifetime: such a buffer never has to be
        copied back, so an eviction costs half.
        """
        accesses = self._accesses[row]
        found = bisect_left(accesses, at)
        if found < len(accesses):
            return accesses[found] - at
        if self._stays[row]:
            return (accesses[0] if accesses else self._turn) + self._turn - at
        return 2 * max(self._end[row] - at, 0)
