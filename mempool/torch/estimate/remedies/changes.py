"""Changes of a job that may save memory, each with code for the user's program and a cost."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mempool.torch.estimate.checkpointing import Checkpointing
from mempool.torch.estimate.device.emulation import emulate_device
from mempool.torch.estimate.fake.copies import fake_model
from mempool.torch.estimate.fake.isolation import isolated
from mempool.torch.estimate.fake.mode import fake_mode
from mempool.torch.estimate.sources.optimizers_and_losses import STAND_INS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mempool.torch.estimate.job import Job


class Cost(IntEnum):
    """Class of a change's cost, the cheapest first."""

    NOTHING = 0  #: neither time nor results change
    ROUNDING = 1  #: no time, but other rounding of results
    RECOMPUTING = 2  #: most of the forward is computed twice
    SMALLER_BATCHES = 3  #: kernels with less work each
    TRANSFERS = 4  #: copies to the host and back
    TRAINING = 5  #: another training, with other hyperparameters and results


@dataclass(frozen=True)
class Change:
    """A change of a job.

    Attributes:
        name: a few words.
        kind: a job can have one change of each kind.
        code: lines to write in the user's program.
        how: description and price.
        cost: class of cost.
        attributes: changed attributes of the job.
        allocator: name of the allocator, if the change is another allocator.
    """

    name: str
    kind: str
    code: str
    how: str
    cost: Cost
    attributes: dict[str, Any] = field(default_factory=dict)
    allocator: str | None = None


#: A change in several strengths, the weakest first.
Strengths = tuple[Change, ...]

_POOL = "import mempool.torch; pool = mempool.torch.install(); pool.watch(optimizer)"
_PLANNED = Change(
    "planned pool",
    "allocator",
    _POOL,
    "every buffer gets its address by a plan, so that nothing is lost between buffers",
    Cost.NOTHING,
    allocator="planned",
)
_EXPANDABLE = Change(
    "expandable segments",
    "allocator",
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "PyTorch's own allocator maps memory in pages, so that less is lost between buffers",
    Cost.NOTHING,
    allocator="pytorch_expandable",
)
_ON_HOST = Change(
    "activations on the host",
    "offloading",
    "with torch.autograd.graph.save_on_cpu(pin_memory=True): output = model(...)",
    "what the backward needs is copied to the host, and back when it is needed; nothing else runs meanwhile",
    Cost.TRANSFERS,
    {"save_on_cpu": True},
)


def changes_of(job: Job) -> list[Strengths]:
    """Return all changes that apply to a job, the cheapest first.

    The job's model and optimizer are made without memory.
    """
    with isolated(), fake_mode(), emulate_device(job.device, capability=job.capability):
        model = fake_model(job.model, None)
        optimizer = job.optimizer([nn.Parameter(torch.empty(1))]) if job.optimizer is not None else None
    found = [_PLANNED, *_outputs(job), *_precisions(job, model)]
    if job.device == "cuda":
        found.append(_EXPANDABLE)
    if job.mode == "train":
        found += [*_optimizers(job, optimizer), *_checkpoints(job, model)]
        found += [_ON_HOST] * (job.device == "cuda")
    return sorted([*((change,) for change in found), *_batches(job)], key=lambda strengths: strengths[0].cost)


def applied(job: Job, changes: Sequence[Change]) -> Job:
    """Return the job with several changes of different kinds."""
    for change in changes:
        job = job.replace(**change.attributes)
    return job


def _outputs(job: Job) -> Iterator[Change]:
    if job.holds_output:
        yield Change(
            "drop outputs",
            "output",
            "del output, loss" if job.mode == "train" else "del output",
            "the last step's output is freed before the next forward",
            Cost.NOTHING,
            {"hold_output": False},
        )


def _optimizers(job: Job, optimizer: Any) -> Iterator[Change]:
    """Yield changes of the optimizer: fused kernels, and other optimizers."""
    path = _class_path(type(optimizer))
    if optimizer.defaults.get("fused", True) in (None, False):
        yield Change(
            "fused optimizer",
            "optimizer",
            f"{path}(..., fused=True)",
            "one kernel updates parameters in place, without temporaries",
            Cost.NOTHING,
            {"optimizer": _fused(job.optimizer)},
        )
    adam = "Adam" in type(optimizer).__name__ and not path.startswith("bitsandbytes")
    if adam:
        yield Change(
            "8-bit optimizer state",
            "optimizer",
            "bitsandbytes.optim.AdamW8bit(model.parameters(), lr=...)",
            "two bytes of state a parameter, by the layout of bitsandbytes; the state is rounded",
            Cost.ROUNDING,
            {"optimizer": STAND_INS["AdamW8bit"]},
        )
    if adam or optimizer.defaults.get("momentum"):
        yield Change(
            "SGD",
            "optimizer",
            "torch.optim.SGD(model.parameters(), lr=...)",
            "no state; another training",
            Cost.TRAINING,
            {"optimizer": functools.partial(torch.optim.SGD, lr=0.01)},
        )


def _class_path(kind: type) -> str:
    """Return the package and name of an optimizer's class, without the modules inside a known package."""
    package = next((p for p in ("torch.optim", "bitsandbytes.optim") if kind.__module__.startswith(p)), None)
    return f"{package or kind.__module__}.{kind.__name__}"


def _fused(make: Any) -> Callable[..., torch.optim.Optimizer]:
    def made(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = make(parameters)
        for group in optimizer.param_groups:
            group.update(foreach=False, fused=True)
        return optimizer

    return made


def _precisions(job: Job, model: nn.Module) -> Iterator[Change]:
    types = {parameter.dtype for parameter in model.parameters()}
    if torch.float32 not in types or job.dtype is not None or job.autocast is not None:
        return
    yield Change(
        "autocast to bfloat16",
        "precision",
        f'with torch.autocast("{job.device}", torch.bfloat16): output = model(...)  # and the loss',
        "products of matrices in bfloat16, weights and state in float32",
        Cost.ROUNDING,
        {"autocast": torch.bfloat16},
    )
    trains = job.mode == "train"
    yield Change(
        "bfloat16 weights",
        "precision",
        "model.to(torch.bfloat16)  # and floating inputs",
        "weights, gradients, activations and optimizer state in bfloat16: small updates are lost"
        if trains
        else "weights and activations in bfloat16",
        Cost.TRAINING if trains else Cost.ROUNDING,
        {"dtype": torch.bfloat16},
    )


def _checkpoints(job: Job, model: nn.Module) -> Iterator[Change]:
    found = Checkpointing.of(model)
    if found is not None and not job.checkpoint:
        yield Change(
            "checkpointing",
            "checkpointing",
            found.code,
            "blocks keep only their inputs and compute the rest again in the backward; batch normalisation "
            "updates its running statistics twice a step",
            Cost.RECOMPUTING,
            {"checkpoint": True},
        )


def _batches(job: Job) -> list[Strengths]:
    parts = [k for k in (1 << n for n in range(1, job.batch.bit_length())) if job.batch % k == 0]
    return [tuple(_batch_in_parts(job, k) for k in parts)] if parts else []


def _batch_in_parts(job: Job, parts: int) -> Change:
    small = job.batch // parts
    if job.mode == "train":
        code = f"for part in batch.split({small}): (loss_of(part) / {parts}).backward()  # then step"
        how = "gradients of smaller batches add up; batch normalisation sees smaller batches"
        # Two batches suffice: the second starts while the gradients of the first are alive.
        attributes = {"batch": small, "accumulate": max(2, job.accumulate)}
    else:
        code = f"for part in batch.split({small}): output = model(part)"
        how = "smaller batches, one after the other"
        attributes = {"batch": small}
    return Change(f"{parts} batches of {small}", "batch", code, how, Cost.SMALLER_BATCHES, attributes)
