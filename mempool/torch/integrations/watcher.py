"""Watcher of a training, which the callbacks for all trainers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mempool.torch
from mempool.recording.optimizers import hooked_optimizer

if TYPE_CHECKING:
    from mempool.torch.pool import TensorPool

#: Numbers that are logged only if there is a limit.
WITH_A_LIMIT = ("limit_bytes", "waited_seconds")


class TrainingWatcher:
    """A pool beside a training: its iterations, its phases, and its numbers for loggers.

    Attributes:
        pool: the pool that serves PyTorch.
        phase: name of the present phase, such as "training" or "evaluation".
    """

    def __init__(self, pool: TensorPool | None, options: dict[str, Any]) -> None:
        """Take a pool, or the installed one, or else install one with these options."""
        self.pool = pool or mempool.torch.installed() or mempool.torch.install(**options)
        self.phase = "training"
        self._handle: Any = None
        self._scope: Any = None  # of a phase that follows no plan
        self._steps_by_hand = False

    def watch(self, optimizer: Any) -> None:
        """End an iteration with each step of this optimizer, and of no other."""
        self.end()
        self._steps_by_hand = hooked_optimizer(optimizer) is None  # such as DeepSpeed's
        if self._steps_by_hand:
            self.pool.require_step_marks()
        else:
            self._handle = self.pool.watch(optimizer)

    def stepped(self) -> None:
        """Note a step that the trainer reports; it ends an iteration if the optimizer has no hooks."""
        if self._steps_by_hand:
            self.pool.step()

    def begin(self, phase: str) -> None:
        """Begin a phase whose allocations follow no plan, unless one has begun."""
        if self._scope is None:
            self.phase, self._scope = phase, self.pool.dynamic()
            self._scope.__enter__()

    def resume(self) -> None:
        """Go on with the training."""
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
    """Base of the callbacks for trainers, which watch a training with a pool until the training ends.

    Attributes:
        watcher: the pool, and the present phase.
    """

    def __init__(self, pool: TensorPool | None = None, **options: Any) -> None:
        """Use `pool`, or the installed one, or install one.

        Args:
            pool: a pool that serves PyTorch.
            options: options of `mempool.torch.install`, for a pool that is installed here.
        """
        self.watcher = TrainingWatcher(pool, options)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop watching; the pool goes on serving."""
        self.watcher.end()
