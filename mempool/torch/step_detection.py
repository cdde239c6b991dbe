"""Detection of iterations in programs without marks, from the steps of the first optimizer that steps.

If an optimizer steps, its step is the iteration: shorter repetitions, such as the cells of an LSTM in a
Python loop, are parts of the iteration, and batches of random length have no period at all. A written trace
has marks of the steps, too, for planners that read the trace.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from mempool.torch.optimizer_steps import Listener

if TYPE_CHECKING:
    from mempool.torch.pool import TensorPool

#: Successive steps of other optimizers after which the optimizer that ended iterations counts as finished.
#: Not measured: a GAN's discriminator steps a few times for each step of its generator.
IDLE_STEPS = 64


class StepDetector:
    """Observer of one pool that acts at each step of an optimizer.

    Attributes:
        ends_iterations: true if the steps end the pool's iterations.
    """

    def __init__(self, pool: TensorPool, *, ends: bool, marks_trace: bool) -> None:
        """Start observing all optimizers.

        Args:
            pool: the pool whose steps are counted.
            ends: whether steps end the pool's iterations.
            marks_trace: whether steps set marks in the pool's trace.
        """
        self._pool = weakref.ref(pool)
        self.ends_iterations, self._marks_trace = ends, marks_trace
        self._optimizer: Any = None
        self._idle_steps = 0
        self._listener = Listener(before=self._before_step, after=self._after_step)

    def end(self) -> None:
        """Stop observing, for example because the program marks iterations."""
        self._listener.remove()

    def _before_step(self, _: torch.optim.Optimizer) -> None:
        pool = None if torch.compiler.is_compiling() else self._pool()
        if pool is not None and self.ends_iterations and self._optimizer is None:
            pool.expect_step()

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        pool = None if torch.compiler.is_compiling() else self._pool()
        if pool is None or not self.is_followed(optimizer):
            return
        if self.ends_iterations:
            pool.mark_detected_step()
            return
        pool.step_counter.count()
        if self._marks_trace:
            pool.client.record_detected_step()

    def is_followed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return true for the first optimizer that steps, while it keeps stepping."""
        known = None if self._optimizer is None else self._optimizer()
        if known is None or (known is not optimizer and self._idle_steps >= IDLE_STEPS):
            self._optimizer, known = weakref.ref(optimizer), optimizer
        self._idle_steps = 0 if known is optimizer else self._idle_steps + 1
        return known is optimizer
