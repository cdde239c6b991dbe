"""Detection of iterations by optimizer steps, for programs without marks; the first optimizer to step counts.

Detection of a pattern needs a period. Batches of random length have no period, although each training step
resembles an earlier one. So if nothing was marked for long, and many allocations had no place in a plan,
iterations from then on end with the optimizer's steps. A written trace shows these steps from the
beginning: a planner that reads the trace has no program to watch.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from mempool.logs import log
from mempool.reporting.outcomes import NewOutcomes, missed
from mempool.torch.optimizer_steps import Listener

if TYPE_CHECKING:
    from mempool.torch import TensorPool


#: Optimizer steps between two checks of how well plans are followed.
STEPS_BETWEEN_LOOKS = 16
#: Smallest share of hits among the allocations between two checks that shows a loop that repeats.
LEAST_HITS = 0.9
#: Consecutive checks that must find a smaller share; the first check does not count, since no plan exists by
#: then.
LOOKS = 2
#: Missed allocations without any plan before which a check does not count: the planner may not have run yet.
LEAST_ALLOCATIONS = 1 << 11
#: Consecutive steps of other optimizers after which the optimizer that ended iterations is considered
#: finished.
STEPS_OF_OTHERS = 64


class FoundSteps:
    """Observer of one pool that acts after each step of an optimizer."""

    def __init__(self, pool: TensorPool, *, ends: bool, shown: bool) -> None:
        """Begin to observe.

        Args:
            pool: the pool whose iterations are ended.
            ends: end the pool's iterations if detection finds no order.
            shown: show the steps in the pool's trace.
        """
        self._pool = weakref.ref(pool)
        self._ends, self._shown = ends, shown
        self._optimizer: Any = None
        self._steps = self._in_vain = self._others = 0
        self._new = NewOutcomes()
        self._marks = False
        self._listener = Listener(after=self._stepped)

    def end(self) -> None:
        """Stop observing, for example because the program marks the end of iterations."""
        self._listener.remove()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        pool = None if torch.compiler.is_compiling() else self._pool()
        if pool is None:
            return
        if not self._is_the_one(optimizer):
            return
        if self._marks:
            pool.mark_found_step()
            return
        self._steps += 1
        if self._ends and self._steps % STEPS_BETWEEN_LOOKS == 0 and self._is_in_no_order(pool):
            log.info("what recurs comes in no fixed order: iterations end with the steps of the optimizer")
            self._marks = True
            pool.reset_plans()
            pool.mark_found_step()
        elif self._shown:
            pool.client.record_detected_step()

    def _is_the_one(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return true if this optimizer ends iterations: the first to step, as long as it keeps stepping."""
        known = None if self._optimizer is None else self._optimizer()
        if known is None or (known is not optimizer and self._others >= STEPS_OF_OTHERS):
            self._optimizer, known = weakref.ref(optimizer), optimizer
        self._others = 0 if known is optimizer else self._others + 1
        return known is optimizer

    def _is_in_no_order(self, pool: TensorPool) -> bool:
        outcomes = pool.client.stats()["outcomes"]
        new = self._new.of(outcomes)
        follows = new["hit"] >= LEAST_HITS * (new["hit"] + missed(new))
        unplanned = pool.plans == 0 and missed(outcomes) < LEAST_ALLOCATIONS
        early = self._steps == STEPS_BETWEEN_LOOKS or unplanned
        self._in_vain = 0 if follows or early else self._in_vain + 1
        return self._in_vain >= LOOKS
