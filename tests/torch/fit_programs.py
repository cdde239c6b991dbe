"""Jobs for estimates, and the same programs on real tensors as a user would write them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from models import GPT, ResNet
from torch import Tensor, nn

from mempool.recording.torch import AccessRecorder
from mempool.torch.estimate import Job, fit_job
from mempool.torch.estimate.attribution import PeakAttribution

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.torch.estimate import Fit


class WithLoss(nn.Module):
    """A model of `models.py` that returns its loss, like models of transformers."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *batch: Tensor) -> Tensor:
        return self.inner.loss(*batch)


class Dropping(nn.Module):
    """Blocks with dropout, whose random numbers a checkpoint must reproduce."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 64))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def llama() -> nn.Module:
    """Return a small Llama with three layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=160,
    )
    return LlamaForCausalLM(config)


def words(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs of `llama`."""
    given = torch.randint(0, 500, (batch, 40))
    return (), {"input_ids": given, "labels": given}


def gpt_inputs(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randint(0, 300, (batch, 49)),), {}


def pictures(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))), {}


def rows(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(batch, 64),), {}


#: Constructor of each model, and its inputs by batch size.
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "gpt": (lambda: WithLoss(GPT()), gpt_inputs),
    "resnet": (lambda: WithLoss(ResNet()), pictures),
    "llama": (llama, words),
    "dropping": (Dropping, rows),
}


def job_of(program: str, *, device: str = "cpu", batch: int = 8, **more: Any) -> Job:
    """Return a job of one of `PROGRAMS`, with AdamW by default."""
    model, inputs = PROGRAMS[program]
    return Job(
        **{"model": model, "inputs": inputs, "batch": batch, "optimizer": torch.optim.AdamW} | more,
        device=device,
    )


def fit_of(job: Job, limit_bytes: int | None = None) -> Fit:
    """Estimate a job without remedies and without a search for the largest batch."""
    return fit_job(job, limit_bytes, remedies=False, largest=False, allocators=("pytorch",))


@dataclass
class Written:
    """A training program on real tensors that can be changed by the code of a remedy.

    Attributes:
        program: one of `PROGRAMS`.
        change: function applied to the new model.
        optimizer: constructor of the optimizer, from the parameters.
        around: context of the forward pass.
        parts: number of batches whose gradients are accumulated.
        drop: whether output and loss are deleted before the next step.
        cast: type of the floating-point inputs.
    """

    program: str
    batch: int = 8
    change: Callable[[nn.Module], object] = lambda _: None
    optimizer: Any = torch.optim.AdamW
    around: Callable[[], Any] = contextlib.nullcontext
    parts: int = 1
    drop: bool = False
    cast: torch.dtype | None = None
    losses: list[float] = field(default_factory=list)

    def run(self, steps: int = 2) -> int:
        """Return the peak load of the steps after the first, in bytes."""
        make, inputs = PROGRAMS[self.program]
        torch.manual_seed(7)
        model = make()
        self.change(model)
        self.model = model
        optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
        with AccessRecorder([model], [optimizer]) as recorder:
            for _ in range(steps):
                for _ in range(self.parts):
                    args, kwargs = inputs(self.batch // self.parts)
                    if self.cast:
                        args = tuple(a.to(self.cast) if a.is_floating_point() else a for a in args)
                    with self.around():
                        output = model(*args, **kwargs)
                        loss = output if isinstance(output, Tensor) else output["loss"]
                    if self.drop:
                        output = None
                    if self.parts > 1:
                        loss = loss / self.parts
                    self.losses.append(loss.item())
                    loss.backward()
                    if self.drop:
                        del loss
                optimizer.step()
                optimizer.zero_grad()
                recorder.step()
        return PeakAttribution.of(recorder.trace()).peak.bytes
