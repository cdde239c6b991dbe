"""Iterations of a program that marks none: the steps of its optimizer, the one that stepped first.

Detection needs a period. Batches of any of a few lengths, drawn at random, have none, though each step of
training is like some earlier one. So where nothing was marked for long, and much of what was allocated had no
place in a plan, iterations end from then on as the optimizer steps. A trace that is written shows its steps
from the beginning: whoever plans from it has no program to watch.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from mempool.logs import log
from mempool.report import NewOutcomes, missed
from mempool.torch.optimizer_steps import Listener

if TYPE_CHECKING:
    from mempool.torch import TensorPool


#: Steps of the optimizer from one look at how well plans are followed to the next.
STEPS_BETWEEN_LOOKS = 16
#: A loop that repeats hits more than this share of its allocations by then.
LEAST_HITS = 0.9
#: So many looks in a row must show less, after the first, before which there is no plan.
LOOKS = 2
#: Where there is no plan at all: the planner may have had no turn yet before so many allocations.
LEAST_ALLOCATIONS = 1 << 11
#: After so many steps of other optimizers in a row, the one that ended iterations is taken to be done.
STEPS_OF_OTHERS = 64


class FoundSteps:
    """Looks at one pool each time an optimizer has stepped."""

    def __init__(self, pool: TensorPool, *, ends: bool, shown: bool) -> None:
        """Begin.

        Args:
            pool: whose iterations they are.
            ends: end its iterations where detection finds no order.
            shown: in its trace.
        """
        self._pool = weakref.ref(pool)
        self._ends, self._shown = ends, shown
        self._optimizer: Any = None
        self._steps = self._in_vain = self._others = 0
        self._new = NewOutcomes()
        self._marks = False
        self._listener = Listener(after=self._stepped)

    def end(self) -> None:
        """No longer, as when the program says itself where its iterations end."""
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
            pool.begin_anew()
            pool.mark_found_step()
        elif self._shown:
            pool.client.show_found()

    def _is_the_one(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this one ends iterations: the first that stepped, as long as it does."""
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
