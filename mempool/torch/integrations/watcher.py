"""Watcher of a training, shared by the callbacks for all trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mempool.torch
from mempool.recording.optimizers import hooked_optimizer

if TYPE_CHECKING:
    from mempool.torch.pool import TensorPool

#: Numbers that are logged only if there is a limit.
WITH_A_LIMIT = ("limit_bytes", "waited_seconds")


class TrainingWatcher:
    """A pool's iterations, phases, and numbers for loggers during a training.

    Attributes:
        pool: the pool that serves PyTorch.
        phase: name of the present phase, such as "training" or "evaluation".
    """

    def __init__(self, pool: TensorPool | None, options: dict[str, Any]) -> None:
        """Use `pool`, else the installed pool, else install a pool with these options."""
        self.pool = pool or mempool.torch.installed() or mempool.torch.install(**options)
        self.phase = "training"
        self._handle: Any = None
        self._scope: Any = None  # scope of a phase without plan
        self._steps_by_hand = False

    def watch(self, optimizer: Any) -> None:
        """End iterations with the steps of this optimizer only."""
        self.end()
        self._steps_by_hand = hooked_optimizer(optimizer) is None  # e.g. DeepSpeed's
        if self._steps_by_hand:
            self.pool.require_step_marks()
        else:
            self._handle = self.pool.watch(optimizer)

    def stepped(self) -> None:
        """Handle a step that the trainer reports: end an iteration if the optimizer has no hooks."""
        if self._steps_by_hand:
            self.pool.step()

    def begin(self, phase: str) -> None:
        """Begin a phase without a plan, unless such a phase has begun."""
        if self._scope is None:
            self.phase, self._scope = phase, self.pool.dynamic()
            self._scope.__enter__()

    def resume(self) -> None:
        """Resume the training."""
        self.phase = "training"
        if self._scope is not None:
            self._scope.__exit__(None, None, None)
            self._scope = None

    def end(self) -> None:
        """Stop watching; the pool goes on serving."""
        self.resume()
        self._steps_by_hand = False
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def metrics(self) -> dict[str, float]:
        """Return the numbers of `pool.metrics()`, with keys such as "mempool/hit_rate"."""
        return {
            f"mempool/{key}": value
            for key, value in self.pool.metrics().items()
            if not isinstance(value, str) and (value or key not in WITH_A_LIMIT)
        }


class WatchingCallback:
    """Base class of callbacks for trainers, which watch a training for a pool until its end.

    Attributes:
        watcher: the pool, and the present phase.
    """

    def __init__(self, pool: TensorPool | None = None, **options: Any) -> None:
        """Use `pool`, else the installed pool, else install a pool.

        Args:
            pool: a pool that serves PyTorch.
            options: options of `mempool.torch.install` for a new pool.
        """
        self.watcher = TrainingWatcher(pool, options)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop watching; the pool goes on serving."""
        self.watcher.end()
