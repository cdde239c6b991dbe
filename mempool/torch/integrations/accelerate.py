"""Tracker for accelerate's `Accelerator`, which has trackers of logs, but no callbacks.

    from mempool.torch.integrations.accelerate import PoolTracker

    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    accelerator.init_trackers("run")
    tracker = PoolTracker(accelerator, optimizer)
    ...
    with tracker.phase("evaluation"):
        evaluate(model)

Every `accelerator.log` then also logs the pool's numbers.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from accelerate.tracking import GeneralTracker

from mempool.torch.integrations.watcher import TrainingWatcher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.torch.pool import TensorPool


class PoolTracker(GeneralTracker):
    """Tracker that watches the optimizer for a pool, and logs the pool's numbers to the other trackers.

    `accelerator.log` calls this tracker, which then logs to the other trackers; `accelerator.end_training`
    ends the watching.

    Attributes:
        watcher: the pool, and the present phase.
    """

    name = "mempool"
    requires_logging_directory = False

    def __init__(
        self, accelerator: Any, optimizer: Any, pool: TensorPool | None = None, **options: Any
    ) -> None:
        """Register with the accelerator, and watch the optimizer.

        Args:
            accelerator: an accelerator; call `init_trackers` before, or after.
            optimizer: the optimizer, prepared or not.
            pool: a pool that serves PyTorch; by default the installed pool, or a newly installed pool.
            options: options of `mempool.torch.install` for a new pool.
        """
        super().__init__()
        self.watcher = TrainingWatcher(pool, options)
        self.watcher.watch(optimizer)
        self._accelerator = accelerator
        accelerator.trackers.append(self)

    @property
    def tracker(self) -> TensorPool:
        """The pool."""
        return self.watcher.pool

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Exclude a part of the program, such as an evaluation, from the plan."""
        self.watcher.begin(name)
        try:
            yield
        finally:
            self.watcher.resume()

    def log(self, _: dict[str, Any], step: int | None = None, **__: Any) -> None:
        """Log the pool's numbers to the other trackers, for the same step."""
        for tracker in self._accelerator.trackers:
            if tracker is not self:
                tracker.log(self.watcher.metrics(), step=step)

    def finish(self) -> None:
        """Stop watching; the pool still serves."""
        self.watcher.end()
