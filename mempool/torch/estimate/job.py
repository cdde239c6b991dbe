"""Definition of a job: a model, its inputs, an optimizer, and their use in a step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mempool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn


#: Kinds of steps, the values of `Job.mode`.
MODES = ("train", "inference")
DEVICES = ("cuda", "cpu")


@dataclass(frozen=True)
class Job:
    """A step to try; nothing is made before the trial.

    Attributes:
        model: makes the model; called inside a fake mode.
        inputs: makes positional and named arguments of the model for a batch size; likewise.
        batch: samples in a batch.
        optimizer: makes the optimizer of parameters, as ``torch.optim.AdamW`` does, or a name; None for
            inference.
        loss: the loss of the model's output, and of ``labels`` if given; or a name such as "cross-entropy",
            as ``mempool fit --loss`` accepts. None: the output's own ``loss`` if present, else the sum of the
            output's floating-point tensors.
        labels: second argument of the loss, for a batch size; None for no second argument.
        mode: "train": forward, loss, backward, optimizer step; "inference": a forward without gradients.
        device: device of the real run, "cuda" or "cpu": decides rounding and the choice of kernels.
        capability: compute capability of a CUDA device, which decides between kernels: (8, 0) is an A100.
        dtype: of the floating-point parameters, or a name; None: as made. Without autocast floating-point
            inputs get this type, too.
        autocast: lower precision of the forward; None: none.
        checkpoint: whether the model's blocks recompute their activations in the backward.
        save_on_cpu: whether tensors kept for the backward are on the host, as in
            ``torch.autograd.graph.save_on_cpu``.
        accumulate: batches whose gradients add up to one optimizer step.
        hold_output: whether the program keeps output and loss until the next step replaces them, as a loop
            without functions does; else they die after their last use. None: in training they are kept;
            without gradients they are not, since ``model.generate``, a function or one call keeps no former
            output, which with a key-value cache may be most of the memory.
        card: name of a GPU in `mempool.hardware.gpu_throughput`, whose rates determine times; None: the
            default.

    Raises:
        UsageError: mode or device is unknown, or batch is below one.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    batch: int
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    loss: Callable[..., torch.Tensor] | None = None
    labels: Callable[[int], Any] | None = None
    mode: str = "train"
    device: str = "cuda"
    capability: tuple[int, int] = (8, 0)
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    checkpoint: bool = False
    save_on_cpu: bool = False
    accumulate: int = 1
    hold_output: bool | None = None
    card: str | None = None

    def __post_init__(self) -> None:
        self._resolve()
        if self.mode not in MODES:
            raise UsageError(f"no mode {self.mode!r}; there are {', '.join(MODES)}")
        if self.device not in DEVICES:
            raise UsageError(f"no device {self.device!r}; there are {', '.join(DEVICES)}")
        if self.batch < 1 or self.accumulate < 1:
            raise UsageError(f"batch is {self.batch}, accumulate {self.accumulate}: neither can be below one")
        if self.optimizer is None and self.mode != "inference":
            raise UsageError(f"mode {self.mode!r} needs an optimizer, such as torch.optim.AdamW")

    def _resolve(self) -> None:
        """Replace names of the command line, such as "sgd+momentum", by losses, optimizers and types."""
        names = ("optimizer", "loss", "dtype", "autocast")
        if named := [name for name in names if isinstance(getattr(self, name), str)]:
            from mempool.torch.estimate.sources.optimizers_and_losses import resolve  # imports PyTorch

            for name in named:
                object.__setattr__(self, name, resolve(name, getattr(self, name)))
            if "loss" in named:  # makes labels itself
                object.__setattr__(self, "labels", None)
        for name in ("loss", "optimizer"):
            if (value := getattr(self, name)) is not None and not callable(value):
                raise UsageError(f"{name} is {value!r}: neither a function nor a name, as --{name} takes it")

    @property
    def holds_output(self) -> bool:
        """Return whether the output of a step is alive in the next forward."""
        return self.mode == "train" if self.hold_output is None else self.hold_output

    def replace(self, **changes: Any) -> Job:
        """Return the job with other attributes."""
        return dataclasses.replace(self, **changes)
