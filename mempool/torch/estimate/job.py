"""Definition of a job: a step of a model with its inputs and an optimizer."""

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
    """A step of a model, whose objects are made only in a fake run.

    Attributes:
        model: function that makes the model; called inside a fake mode.
        inputs: function that makes the model's positional and named arguments for a batch size; called inside
            a fake mode.
        batch: samples in a batch.
        optimizer: function that makes the optimizer of parameters, such as ``torch.optim.AdamW``, or a name;
            None for inference.
        loss: function of the model's output, and of ``labels`` if given; or a name such as "cross-entropy",
            as for ``mempool fit --loss``. None: the output's own ``loss`` if present, else the sum of the
            output's floating-point tensors.
        labels: function that makes the loss's second argument for a batch size; None without one.
        mode: "train": forward, loss, backward, optimizer step; "inference": a forward without gradients.
        device: device of the real run, "cuda" or "cpu", which determines rounding and kernels.
        capability: compute capability of a CUDA device, which decides between kernels: (8, 0) is an A100.
        dtype: type of the floating-point parameters, or its name; None: unchanged. Without autocast,
            floating-point inputs get this type, too.
        autocast: lower precision of the forward; None: none.
        checkpoint: whether the model's blocks recompute their activations in the backward pass.
        save_on_cpu: whether tensors kept for the backward are on the host, as in
            ``torch.autograd.graph.save_on_cpu``.
        accumulate: number of batches per optimizer step.
        hold_output: whether the program keeps output and loss until the next step replaces them, as in a loop
            without functions; False: they are freed after their last use. None: true for training, false for
            inference, since ``model.generate``, a function or a single call keeps no former output (with a
            key-value cache, possibly most of the memory).
        card: name of a GPU in `mempool.hardware.gpu_throughput` for modelled times; None: the default.

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
            if "loss" in named:  # the loss makes its labels
                object.__setattr__(self, "labels", None)
        for name in ("loss", "optimizer"):
            if (value := getattr(self, name)) is not None and not callable(value):
                raise UsageError(f"{name} is {value!r}: neither a function nor a name, as --{name} takes it")

    @property
    def holds_output(self) -> bool:
        """Return whether the output of a step is alive in the next forward pass."""
        return self.mode == "train" if self.hold_output is None else self.hold_output

    def replace(self, **changes: Any) -> Job:
        """Return the job with other attributes."""
        return dataclasses.replace(self, **changes)
