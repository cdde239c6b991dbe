"""Callback for Lightning's `Trainer`.

    from mempool.torch.integrations.lightning import PoolCallback

    lightning.Trainer(callbacks=[PoolCallback()]).fit(module, batches)

Every active logger gets the pool's numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback

from mempool.torch.integrations.watcher import TrainingWatcher

if TYPE_CHECKING:
    from mempool.torch.pool import TensorPool


class PoolCallback(Callback):
    """A pool under a training: watches the optimizer, and gives the pool's numbers to each logger.

    Validation, test and prediction follow no plan. Of several optimizers the last one ends iterations.

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

    def on_train_start(self, trainer: Any, _: Any) -> None:
        """Watch the optimizer, which exists from now on."""
        if trainer.optimizers:
            self.watcher.watch(trainer.optimizers[-1])

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Log as often as the trainer does."""
        self.watcher.stepped()
        each = trainer.log_every_n_steps
        if each and (trainer.fit_loop.total_batch_idx + 1) % each == 0:
            for logger in trainer.loggers:
                logger.log_metrics(self.watcher.metrics(), step=trainer.global_step)

    def on_validation_start(self, *_: Any) -> None:
        """Begin a phase without a plan."""
        self.watcher.begin("validation")

    def on_test_start(self, *_: Any) -> None:
        """Begin a phase without a plan."""
        self.watcher.begin("test")

    def on_predict_start(self, *_: Any) -> None:
        """Begin a phase without a plan."""
        self.watcher.begin("prediction")

    def on_validation_end(self, *_: Any) -> None:
        """Go on with the training."""
        self.watcher.resume()

    on_test_end = on_predict_end = on_validation_end

    def on_train_end(self, *_: Any) -> None:
        """Stop watching; the pool goes on serving."""
        self.watcher.end()

    on_exception = on_train_end
