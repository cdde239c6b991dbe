"""Callback for Lightning's `Trainer`.

    from mempool.torch.integrations.lightning import PoolCallback

    lightning.Trainer(callbacks=[PoolCallback()]).fit(module, batches)

Every active logger gets the pool's numbers.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from mempool.torch.integrations.watcher import WatchingCallback


class PoolCallback(WatchingCallback, Callback):
    """Callback that watches the optimizer for a pool, and logs the pool's numbers to each logger.

    Validation, test and prediction follow no plan. Of several optimizers, the last one ends iterations.
    """

    def on_train_start(self, trainer: Any, _: Any) -> None:
        """Watch the optimizer, which the trainer has just made."""
        if trainer.optimizers:
            self.watcher.watch(trainer.optimizers[-1])

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Log at the trainer's interval."""
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
        """Resume the training."""
        self.watcher.resume()

    on_test_end = on_predict_end = on_validation_end

    on_exception = WatchingCallback.on_train_end
