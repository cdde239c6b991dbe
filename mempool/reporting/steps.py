"""Steps of a program: counts, and the steps at which plans took effect."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mempool import _core

#: Steps from the effect of a plan until all pages of the arena are touched: two columns of offsets, and a
#: step that began before the plan.
SETTLING_STEPS = 4


class StepCounter:
    """Counter of a program's steps: those of an optimizer, or those that the program marks.

    Attributes:
        steps: completed steps.
        planned_from: first whole step with a plan; 0 without a plan.
    """

    def __init__(self, client: _core.Client) -> None:
        self._client = client
        self._latest_plan = 0
        self._settled: tuple[int, int] | None = None  # step, and page faults of the process at that time
        self._faults = 0
        self.steps = self.planned_from = 0

    def count(self) -> None:
        """Count a completed step."""
        self.steps += 1
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        state = self._client.state()
        latest = state["latest_plan_active_at_iteration"]
        if latest != self._latest_plan:
            self._latest_plan = latest
            self._settled = self.steps + SETTLING_STEPS, 0
            loaded = state["plan_active_at_iteration"] == 1
            self.planned_from = self.planned_from or (1 if loaded else self.steps + 1)
        elif self._settled is not None and self.steps == self._settled[0]:
            self._settled = self.steps, self._faults

    @property
    def page_faults(self) -> float | None:
        """Page faults of the process per step since the latest plan's arena was touched; None before."""
        if self._settled is None or self.steps <= self._settled[0]:
            return None
        step, faults = self._settled
        return (self._faults - faults) / (self.steps - step)
