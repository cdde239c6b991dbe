"""Base class of pools for PyTorch's tensors on any device."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from mempool.errors import UsageError
from mempool.installation import InstallationSlot, slot_of
from mempool.pool import Pool
from mempool.settings import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from mempool.torch.eager import OffloadSession
    from mempool.torch.step_detection import StepDetector


class TensorPool(Pool):
    """A pool that serves PyTorch until closed."""

    framework = "torch"
    public_names = (
        *(name for name in Pool.public_names if name not in ("allocate", "free", "faults")),
        "watch",
    )
    swaps = True

    def __init__(self, device: Any, **options: Any) -> None:
        self.offloading: OffloadSession | None = None
        self._step_detector: StepDetector | None = None
        super().__init__(device, **{"name": "torch", **options})

    def begin(self) -> None:
        """Serve PyTorch's tensors, and hold the limit if there is one."""
        self.serve()
        ends = self.settings.mode == "replay" and self.settings.limit is None  # swapping finds steps itself
        marks_trace = self._trace_writer is not None and self.settings.limit is None
        if ends or marks_trace:
            from mempool.torch.step_detection import StepDetector

            # a plan file's iterations may end elsewhere
            ends &= self.loaded is None or self.loaded.detected_marks or self.loaded.remembered
            self._step_detector = StepDetector(self, ends=ends, marks_trace=marks_trace)
        if (limit := self.settings.limit) is not None:
            from mempool.torch.eager import OffloadSession

            try:
                self.offloading = OffloadSession(self, self.torch_device, limit, self.mark_detected_step)
            except BaseException:
                self.stop_serving()
                raise

    @property
    def torch_device(self) -> torch.device:
        """The device as a `torch.device`, without an index until the device is decided."""
        raise NotImplementedError

    def serve(self) -> None:
        """Become the allocator of PyTorch's tensors."""
        raise NotImplementedError

    def stop_serving(self) -> None:
        """Stop serving PyTorch, whose live tensors stay valid."""
        raise NotImplementedError

    def mark_detected_step(self) -> None:
        """Mark the end of an iteration detected from an optimizer's steps."""
        with contextlib.suppress(UsageError):  # inside the first `iteration`
            self._step(found=True)

    def expect_step(self) -> None:
        """Postpone plans to the end of the present first step of an optimizer.

        Plans made so far are for repetitions within the step, and would take the optimizer's state into their
        arena. A file's plans are kept if its iterations also end with steps.
        """
        self.planner.learner.require_step_marks(until=NEVER)
        if self.loaded is None or not self.loaded.detected_marks:
            self.loaded = None
            self.client.drop_patterns()

    @property
    def has_detected_marks(self) -> bool:
        """True if iterations end with detected steps of an optimizer, without marks of the program."""
        steps = self._step_detector is not None and self._step_detector.ends_iterations
        return steps and self.step_counter.steps > 0

    def _end_step_detection(self) -> None:
        if self._step_detector is not None:
            self._step_detector.end()

    def watch(self, optimizer: torch.optim.Optimizer) -> Any:
        """End an iteration at every step of the optimizer.

        A framework's wrapper counts as the wrapped optimizer: a call that only accumulates gradients ends no
        iteration. Inside `iteration`, which ends iterations itself, a step raises `UsageError` at its start.

        Returns:
            A handle; ``remove()`` stops the watching.

        Raises:
            UsageError: the argument is neither an optimizer of PyTorch nor a wrapper of one.
        """
        from mempool.recording.optimizers import hooked_optimizer

        hooked = hooked_optimizer(optimizer)
        if hooked is None:
            raise UsageError(
                f"watch() takes an optimizer of torch.optim, not {type(optimizer).__name__}; where something "
                "else steps, call pool.step() after it"
            )
        hooks = _Watch(
            hooked.register_step_pre_hook(lambda *_: self._check_outside_iterations()),
            hooked.register_step_post_hook(lambda *_: self.step()),
        )
        if self.offloading is not None:
            self.offloading.require_marks()
        self._end_step_detection()
        self.require_step_marks()
        return hooks

    def step(self) -> None:
        """Mark the end of one iteration and the beginning of the next, for plans and for offloading."""
        self._end_step_detection()
        super().step()
        if self.offloading is not None:
            self.offloading.mark()

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """Mark one iteration: see `mempool.Pool.iteration`."""
        self._end_step_detection()
        with super().iteration():
            if self.offloading is not None:
                self.offloading.begin()
            try:
                yield
            finally:
                if self.offloading is not None:
                    self.offloading.mark()

    def swapping_values(self) -> dict[str, Any] | None:
        """Return the report's values about offloading; None without offloading."""
        return None if self.offloading is None else self.offloading.values()

    def close(self) -> None:
        """Stop serving PyTorch, and stop planning; tensors stay valid. Offloaded tensors are reloaded."""
        if self.offloading is not None:
            self.offloading.end()
        self._end_step_detection()
        slot.leave(self, self.stop_serving)
        super().close()

    def close_at_exit(self) -> None:
        """Close when Python exits: see `OffloadSession.end_at_exit`."""
        if self.offloading is not None:
            self.offloading.end_at_exit()
        self.close()


class _Watch:
    """The hooks of a watched optimizer."""

    def __init__(self, *hooks: Any) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


slot: InstallationSlot[TensorPool] = slot_of("PyTorch", "mempool.torch")
