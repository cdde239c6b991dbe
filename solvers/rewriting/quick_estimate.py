"""Quick estimate of a step's duration within a limit, from one schedule: for a search."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting.copy_calls import Calls
from solvers.swap.absences import absences_of
from solvers.swap.operation_groups import group_operations

if TYPE_CHECKING:
    from solvers.swap.link import Link
    from solvers.swap.step import Step

#: Steps of more operations are planned in groups, about so many.
_FEW = 1024
_LEAST_SHARE = 16384


class Quick:
    """Schedules of one step with absences in order of their start, in one round.

    Attributes:
        floor_bytes: bytes that the step needs if every absence is used in full.
        floor_op: the operation that needs them.
    """

    def __init__(
        self,
        step: Step,
        link: Link,
        host_limit: int | None = None,
        calls: Calls = Calls(),  # noqa: B008  # frozen
    ) -> None:
        self._host_limit = host_limit
        absences = absences_of(step)
        load = step.load - step.spread(absences.last + 1, absences.use, absences.size)
        self.floor_op = int(load.argmax())
        self.floor_bytes = int(load[self.floor_op])
        absences = absences_of(step, least_bytes=min(64 << 10, step.peak_bytes // _LEAST_SHARE))
        grid = group_operations(step, absences, most_ungrouped=_FEW)
        a = grid.absences
        self._calls = 2 * calls.of(a.size)  # out and back
        self._order = np.argsort(a.last, kind="stable").astype(np.int32)
        self._peak, self._seconds = step.peak_bytes, step.duration
        self._native = grid.native_planner(step, link)

    def seconds(self, limit: int) -> float:
        """Return the seconds of the step, infinite if the limit is not held."""
        if self._peak <= limit:
            return self._seconds
        away = self._peak - limit  # lower bound
        if self.floor_bytes > limit or (self._host_limit is not None and away > self._host_limit):
            return float("inf")
        rows, _, _, stall, _ = self._native.plan(self._order, limit, 1, 1.0)
        return float(self._seconds + stall + self._calls[rows].sum())
