"""Detection of iterations by optimizer steps, for programs without marks; the first optimizer to step counts.

Detection of a pattern needs a period. Batches of random length have no period, although each training step
resembles an earlier one. So if nothing was marked for long, and many allocations had no place in a plan,
iterations from then on end with the optimizer's steps. A written trace shows these steps from the
beginning: a planner that reads the trace has no program to watch.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mempool.logs import log
from mempool.reporting.outcomes import NewOutcomes, missed
from mempool.torch.optimizer_steps import Listener

if TYPE_CHECKING:
    from mempool.torch.pool import TensorPool


@dataclass(frozen=True)
class StepDetectionOptions:
    """Tunables of the step detection.

    Attributes:
        check_interval_steps: optimizer steps between two checks of how well plans are followed.
        min_hit_rate: smallest share of hits among the allocations between two checks that shows a loop that
            repeats.
        failed_checks: consecutive checks that must find a smaller share; the first check does not count,
            since no plan exists by then.
        min_unplanned_misses: missed allocations without any plan before which a check does not count: the
            planner may not have run yet.
        idle_steps: consecutive steps of other optimizers after which the optimizer that ended iterations is
            considered finished.
    """

    check_interval_steps: int = 16
    min_hit_rate: float = 0.9
    failed_checks: int = 2
    min_unplanned_misses: int = 1 << 11
    idle_steps: int = 64


OPTIONS = StepDetectionOptions()


class StepDetector:
    """Observer of one pool that acts after each step of an optimizer.

    Attributes:
        has_decided: true if the steps end the pool's iterations.
    """

    def __init__(self, pool: TensorPool, *, ends: bool, shown: bool, decided: bool = False) -> None:
        """Begin to observe.

        Args:
            pool: the pool whose iterations are ended.
            ends: end the pool's iterations if detection finds no order.
            shown: show the steps in the pool's trace.
            decided: end iterations from the first step on, as those of the loaded plan ended.
        """
        self._pool = weakref.ref(pool)
        self._ends_iterations, self._shows_steps = ends, shown
        self._optimizer: Any = None
        self._steps = self._failed_checks = self._idle_steps = 0
        self._new_outcomes = NewOutcomes()
        self.has_decided = ends and decided
        self._listener = Listener(after=self._after_step)

    def end(self) -> None:
        """Stop observing, for example because the program marks the end of iterations."""
        self._listener.remove()

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        pool = None if torch.compiler.is_compiling() else self._pool()
        if pool is None:
            return
        if not self.ends_iterations(optimizer):
            return
        if self.has_decided:
            pool.mark_detected_step()
            return
        self._steps += 1
        if (
            self._ends_iterations
            and self._steps % OPTIONS.check_interval_steps == 0
            and self._lacks_a_period(pool)
        ):
            log.info("iterations recur in no fixed order: they end with the steps of the optimizer")
            self.has_decided = True
            pool.reset_plans()
            pool.mark_detected_step()
            return
        pool.step_counter.count()
        if self._shows_steps:
            pool.client.record_detected_step()

    def ends_iterations(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return true if this optimizer ends iterations: the first to step, as long as it keeps stepping."""
        known = None if self._optimizer is None else self._optimizer()
        if known is None or (known is not optimizer and self._idle_steps >= OPTIONS.idle_steps):
            self._optimizer, known = weakref.ref(optimizer), optimizer
        self._idle_steps = 0 if known is optimizer else self._idle_steps + 1
        return known is optimizer

    def _lacks_a_period(self, pool: TensorPool) -> bool:
        outcomes = pool.client.stats()["outcomes"]
        new = self._new_outcomes.of(outcomes)
        follows = new["hit"] >= OPTIONS.min_hit_rate * (new["hit"] + missed(new))
        unplanned = pool.plans == 0 and missed(outcomes) < OPTIONS.min_unplanned_misses
        early = self._steps == OPTIONS.check_interval_steps or unplanned
        self._failed_checks = 0 if follows or early else self._failed_checks + 1
        return self._failed_checks >= OPTIONS.failed_checks
