"""Changes of a job that may save memory, each with the code to write and the cost."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from mempool.errors import UsageError
from mempool.torch.estimate.checkpointing import Checkpointing
from mempool.torch.estimate.device.emulation import emulate_device
from mempool.torch.estimate.fake.copies import fake_model, to_fake
from mempool.torch.estimate.fake.eight_bit_optimizers import STAND_INS
from mempool.torch.estimate.fake.isolation import isolated
from mempool.torch.estimate.fake.mode import fake_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mempool.torch.estimate.job import Job


class Cost(IntEnum):
    """Cost of a change, cheapest first: time, and last a change of the training itself."""

    NOTHING = 0  #: neither time nor results change
    LITTLE = 1  #: some kernel launches
    ROUNDING = 2  #: no time, but results are rounded differently
    RECOMPUTING = 3  #: most of the forward is computed twice
    SMALLER_BATCHES = 4  #: kernels with less work each
    TRANSFERS = 5  #: copies to the host and back
    TRAINING = 6  #: a different training: to be tuned again, and may end elsewhere


@dataclass(frozen=True)
class Change:
    """A change of a job.

    Attributes:
        name: a few words.
        kind: a job can have one change of each kind.
        apply: returns the changed job.
        code: lines to write in the user's program.
        how: description and price.
        cost: class of cost.
        allocator: name of the allocator to use, if the change is another allocator.
    """

    name: str
    kind: str
    apply: Callable[[Job], Job]
    code: str
    how: str
    cost: Cost
    allocator: str | None = None


#: The same change in several strengths, weakest first.
Strengths = tuple[Change, ...]


def changes_of(job: Job) -> list[Strengths]:
    """Return all changes that apply to a job, cheapest first.

    The job's model and optimizer are made without memory.
    """
    found = [(change,) for change in [*_allocators(job), *_outputs(job)]]
    with isolated(), fake_mode(), emulate_device(job.device, capability=job.capability):
        model = fake_model(job.model, None)
        optimizer = None if job.mode == "inference" or job.optimizer is None else _made(job.optimizer)
    if job.mode == "train" and optimizer is not None:
        found += [(change,) for change in _optimizers(job, optimizer)]
    found += [(change,) for change in _precisions(job, model)]
    if job.mode == "train":
        found += [(change,) for change in [*_checkpoints(job, model), *_activations_on_host(job)]]
    return sorted([*found, *_batches(job)], key=lambda strengths: strengths[0].cost)


def applied(job: Job, changes: Sequence[Change]) -> Job:
    """Return the job with several changes of different kinds."""
    for change in changes:
        job = change.apply(job)
    return job


def _allocators(job: Job) -> list[Change]:
    planned = Change(
        "planned pool",
        "allocator",
        lambda j: j,
        "import mempool.torch; pool = mempool.torch.install(); pool.watch(optimizer)",
        "every buffer gets its address by a plan, so that nothing is lost between buffers",
        Cost.NOTHING,
        "planned",
    )
    expandable = Change(
        "expandable segments",
        "allocator",
        lambda j: j,
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "PyTorch's own allocator maps memory in pages, so that less is lost between buffers",
        Cost.NOTHING,
        "pytorch_expandable",
    )
    return [planned, expandable] if job.device == "cuda" else [planned]


def _outputs(job: Job) -> list[Change]:
    if not job.holds_output:
        return []
    return [
        Change(
            "drop outputs",
            "output",
            lambda j: j.replace(hold_output=False),
            "del output, loss" if job.mode == "train" else "del output",
            "the last step's output is freed before the next forward",
            Cost.NOTHING,
        )
    ]


def _made(make: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return make([nn.Parameter(torch.empty(1))])


def _optimizers(job: Job, optimizer: torch.optim.Optimizer) -> list[Change]:
    """Return the same optimizer with other settings, and other optimizers."""
    path, make = _class_path(type(optimizer)), job.optimizer
    found = []
    if optimizer.defaults.get("fused", True) in (None, False):
        found.append(
            Change(
                "fused optimizer",
                "optimizer",
                lambda j: j.replace(optimizer=_with_options(make, foreach=False, fused=True)),
                f"{path}(..., fused=True)",
                "one kernel updates parameters in place, without temporaries",
                Cost.NOTHING,
            )
        )
    if job.device == "cuda" and optimizer.defaults.get("foreach", False) is not False:
        found.append(
            Change(
                "optimizer tensor by tensor",
                "optimizer",
                lambda j: j.replace(optimizer=_with_options(make, foreach=False)),
                f"{path}(..., foreach=False)",
                "temporaries of one parameter at a time, not of all; more launches of kernels",
                Cost.LITTLE,
            )
        )
    adam = "Adam" in type(optimizer).__name__ and not path.startswith("bitsandbytes")
    if adam:
        found.append(
            Change(
                "8-bit optimizer state",
                "optimizer",
                lambda j: j.replace(optimizer=STAND_INS["AdamW8bit"]),
                "bitsandbytes.optim.AdamW8bit(model.parameters(), lr=...)",
                "two bytes of state a parameter, by the layout of bitsandbytes; the state is rounded",
                Cost.ROUNDING,
            )
        )
    if adam or optimizer.defaults.get("momentum"):
        found.append(
            Change(
                "SGD",
                "optimizer",
                lambda j: j.replace(optimizer=functools.partial(torch.optim.SGD, lr=0.01)),
                "torch.optim.SGD(model.parameters(), lr=...)",
                "no state; another training",
                Cost.TRAINING,
            )
        )
    return found


def _class_path(kind: type) -> str:
    """Return the package and name of an optimizer's class, without the modules inside a known package."""
    package = next((p for p in ("torch.optim", "bitsandbytes.optim") if kind.__module__.startswith(p)), None)
    return f"{package or kind.__module__}.{kind.__name__}"


def _with_options(make: Any, **options: Any) -> Callable[..., torch.optim.Optimizer]:
    """Return the same optimizer with other group settings, such as ``fused=True``.

    The returned function raises UsageError if the optimizer lacks such a setting.
    """

    def made(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = make(parameters)
        if unknown := options.keys() - optimizer.defaults.keys():
            raise UsageError(f"{type(optimizer).__name__} has no {', '.join(sorted(unknown))}")
        for group in optimizer.param_groups:
            group.update(options)
        return optimizer

    return made


def _precisions(job: Job, model: nn.Module) -> list[Change]:
    types = {parameter.dtype for parameter in model.parameters()}
    if torch.float32 not in types or job.dtype is not None or job.autocast is not None:
        return []
    return [
        Change(
            "autocast to bfloat16",
            "precision",
            lambda j: j.replace(autocast=torch.bfloat16),
            f'with torch.autocast("{job.device}", torch.bfloat16): output = model(...)  # and the loss',
            "products of matrices in bfloat16, weights and state in float32",
            Cost.ROUNDING,
        ),
        Change(
            "bfloat16 weights",
            "precision",
            _in_low_precision,
            "model.to(torch.bfloat16)  # and floating inputs",
            "weights, gradients, activations and optimizer state in bfloat16: small updates are lost"
            if job.mode == "train"
            else "weights and activations in bfloat16",
            Cost.TRAINING if job.mode == "train" else Cost.ROUNDING,
        ),
    ]


def _in_low_precision(job: Job) -> Job:
    """Return the job with floating-point parameters, inputs, gradients and optimizer state in bfloat16."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    def inputs(batch: int) -> Any:
        return pytree.tree_map_only(torch.Tensor, cast, to_fake(job.inputs(batch)))

    return job.replace(dtype=torch.bfloat16, inputs=inputs)


def _checkpoints(job: Job, model: nn.Module) -> list[Change]:
    if job.checkpoint or (found := Checkpointing.of(model)) is None:
        return []
    return [
        Change(
            "checkpointing",
            "checkpointing",
            lambda j: j.replace(checkpoint=True),
            found.code,
            "blocks keep only their inputs and compute the rest again in the backward; batch normalisation "
            "updates its running statistics twice a step",
            Cost.RECOMPUTING,
        )
    ]


def _activations_on_host(job: Job) -> list[Change]:
    if job.device != "cuda":
        return []
    return [
        Change(
            "activations on the host",
            "offloading",
            lambda j: j.replace(model=lambda: save_on_host(fake_model(j.model, None))),
            "with torch.autograd.graph.save_on_cpu(pin_memory=True): output = model(...)",
            "what the backward needs is copied to the host, and back when it is needed; nothing else "
            "runs meanwhile",
            Cost.TRANSFERS,
        )
    ]


def save_on_host(model: nn.Module) -> nn.Module:
    """Make the forward keep no saved tensors on the device, as ``save_on_cpu`` does.

    For fake tensors: a packed tensor holds no memory, and unpacking makes a new tensor, as with
    ``save_on_cpu``.

    Args:
        model: changed in place, and returned.
    """
    model.forward = functools.partial(_hooked, model.forward)
    return model


def _hooked(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with saved_tensors_hooks(lambda t: (t.size(), t.dtype), lambda kept: torch.empty(kept[0], dtype=kept[1])):
        return forward(*args, **kwargs)


def _batches(job: Job) -> list[Strengths]:
    parts = [k for k in (1 << n for n in range(1, job.batch.bit_length())) if job.batch % k == 0]
    return [tuple(_batch_in_parts(job, k) for k in parts)] if parts else []


def _batch_in_parts(job: Job, parts: int) -> Change:
    small = job.batch // parts
    name = f"{parts} batches of {small}"
    if job.mode != "train":
        code = f"for part in batch.split({small}): output = model(part)"
        how = "smaller batches, one after the other"
        return Change(name, "batch", lambda j: j.replace(batch=small), code, how, Cost.SMALLER_BATCHES)
    return Change(
        name,
        "batch",
        # Two batches suffice to show one that starts while the gradients of another are alive.
        lambda j: j.replace(batch=small, accumulate=max(2, j.accumulate)),
        f"for part in batch.split({small}): (loss_of(part) / {parts}).backward()  # then step",
        "gradients of smaller batches add up; batch normalisation sees smaller batches",
        Cost.SMALLER_BATCHES,
    )
