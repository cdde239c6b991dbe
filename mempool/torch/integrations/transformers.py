"""Callback for transformers' `Trainer` and derived trainers, such as trl's.

    from mempool.torch.integrations.transformers import PoolCallback

    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[PoolCallback()]).train()

Every active logger gets the pool's numbers.
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import TrainerCallback

from mempool.torch.integrations.watcher import WatchingCallback


class PoolCallback(WatchingCallback, TrainerCallback):
    """Callback that watches the optimizer for a pool, and adds the pool's numbers to each log.

    Evaluation and prediction follow no plan.
    """

    def on_train_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Watch the optimizer, which the trainer has just made."""
        self._precede_loggers(sys._getframe(1).f_locals.get("self"))
        self.watcher.watch(optimizer)

    def _precede_loggers(self, handler: Any) -> None:
        """Move this callback before those of loggers, since the handler calls them in order.

        The first callback of a handler decides whether to evaluate, and stays first.
        """
        callbacks = getattr(handler, "callbacks", None)
        if isinstance(callbacks, list) and self in callbacks:
            callbacks.remove(self)
            callbacks.insert(1, self)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """End an iteration if the optimizer has no hooks."""
        self.watcher.stepped()

    def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
        """Begin an evaluation if the trainer is about to."""
        if control.should_evaluate:
            self.watcher.begin("evaluation")

    def on_epoch_end(self, *arguments: Any, **_: Any) -> None:
        """Begin an evaluation if the trainer is about to."""
        self.on_step_end(*arguments)

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Begin an evaluation or a prediction that the program called, at its first event."""
        self.watcher.begin("evaluation")

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Go on with the training."""
        self.watcher.resume()

    def on_predict(self, *_: Any, **__: Any) -> None:
        """Go on with the training."""
        self.watcher.resume()

    def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, Any] | None = None, **___: Any) -> None:
        """Add the pool's numbers to the log and to the history."""
        metrics = self.watcher.metrics()
        if logs is not None:
            logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)
