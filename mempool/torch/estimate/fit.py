"""Functions for users: estimates of a model or a job, and remedies if the job does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mempool.errors import UsageError
from mempool.recording.optimizers import hooked_optimizer
from mempool.torch.estimate.estimator import DEFAULT_ALLOCATORS, estimate, with_largest_batch
from mempool.torch.estimate.fake.isolation import shared_isolation
from mempool.torch.estimate.job import Job
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.estimate.remedies.advise import advise
from mempool.units import parse_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.torch.estimate.result import Fit

_ADVICE = "give batch_dim=, or a function of the batch as inputs; no largest batch is searched"


def fit(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Any,
    optimizer: Callable[..., torch.optim.Optimizer] | str | None = torch.optim.AdamW,
    *,
    batch: int | None = None,
    batch_dim: int | None = None,
    limit: int | str | None = None,
    loss: Callable[..., torch.Tensor] | str | None = None,
    labels: Any = None,
    mode: str = "train",
    device: str = "cuda",
    allocators: Sequence[str] = DEFAULT_ALLOCATORS,
    remedies: bool = False,
    progress: Callable[[str], object] = lambda _: None,
    **options: Any,
) -> Fit:
    """Estimate the memory of a model's step in advance, without a GPU or its memory, in about a second.

        import mempool.torch

        print(mempool.torch.fit(model, torch.zeros(32, 3, 224, 224), limit="24GiB"))

    Args:
        model: a module, which stays unchanged, or a function that makes a module without memory.
        inputs: a tensor, a tuple of arguments, a dictionary of named arguments, or a function that returns
            one of these for a batch size.
        optimizer: a class, a function of the parameters (such as `functools.partial` of a class), or a name,
            as for ``mempool fit --optimizer``.
        batch: samples; by default the number in the inputs. Tensors with this size in the batch dimension are
            resized for other batches.
        batch_dim: the batch dimension, by default the first. If the default is doubtful, as for a model with
            the length first, there is a warning and no search for the largest batch.
        limit: limit on the device memory, in bytes or as "24GiB".
        loss: function of the output, and of ``labels`` if given; or a name such as "cross-entropy". By
            default the output's ``loss``, as in transformers models, else the sum of floating-point outputs,
            with a warning.
        labels: second argument of ``loss``: tensors in any structure, or a function of the batch size.
        mode: "train", or "inference" (no gradients, no optimizer).
        device: "cuda" or "cpu": the device of the real step.
        allocators: allocators to simulate for the reserved bytes; the first decides whether the job fits.
        remedies: whether to try remedies, too: some tens of runs.
        progress: called with the name of each trial.
        options: further attributes of a `Job` (dtype, autocast, checkpoint, accumulate, ...), and
            ``largest``: False to skip the search for the largest batch if a limit is given.

    Returns:
        The result; ``print`` shows a report.

    Raises:
        UsageError: an argument is invalid, or the fake run fails; the message is one line with location and
            reason.
    """
    dim = batch_dim or 0
    if dim < 0:
        raise UsageError(f"batch_dim is {dim}: it cannot be below zero")
    own_batch = batch_of(inputs, labels, dim=dim) if not callable(inputs) else None
    if (batch := own_batch if batch is None else batch) is None:
        raise UsageError("how many samples? give batch=, or inputs with a tensor that has a first dimension")
    if not (optimizer is None or callable(optimizer) or isinstance(optimizer, str)):
        raise UsageError(
            f"the optimizer is a {type(hooked_optimizer(optimizer) or optimizer).__name__} of real "
            "parameters: give its class, or functools.partial of it with its settings"
        )
    if not callable(model):
        raise UsageError(f"the model is a {type(model).__name__}, not a torch.nn.Module or what makes one")
    examples = resizable(inputs, own_batch, dim)
    largest = options.pop("largest", None)
    modules: list[str] = []  # that take the length first
    by_name: dict[str, Any] = {"optimizer": optimizer, "loss": loss}  # functions or their names

    def make() -> nn.Module:
        result = model if isinstance(model, nn.Module) else model()
        if not modules and isinstance(result, nn.Module):
            modules.extend(_sequence_first(result))
        return result

    try:
        job = Job(
            model=make,
            inputs=lambda size: call_arguments(examples(size)),
            batch=batch,
            labels=None if labels is None else resizable(labels, own_batch, dim),
            mode=mode,
            device=device,
            **by_name,
            **options,
        )
    except TypeError as error:
        raise UsageError(str(error)) from None
    limit_bytes = parse_memory(limit) if isinstance(limit, str) else limit
    result = fit_job(
        job, limit_bytes, allocators=allocators, remedies=remedies, largest=False, progress=progress
    )
    search = limit_bytes is not None and largest is not False
    doubt = None
    if batch_dim is None and own_batch is not None and (search or batch != own_batch):
        doubt = _batch_doubt(modules, (inputs, labels), own_batch)
    if doubt is not None:
        text = f"the batch is taken to be the first dimension, though {doubt}: {_ADVICE}"
        return replace(result, warnings=[*result.warnings, text])
    return with_largest_batch(job, result, progress=progress) if search else result


@shared_isolation()
def fit_job(
    job: Job,
    limit_bytes: int | None = None,
    *,
    allocators: Sequence[str] = DEFAULT_ALLOCATORS,
    remedies: bool | None = None,
    largest: bool | None = None,
    most_seconds: float = OPTIONS.remedy_seconds,
    progress: Callable[[str], object] = lambda _: None,
) -> Fit:
    """Estimate the memory that a job would need, and try remedies.

    Args:
        job: the step.
        limit_bytes: limit on the device memory.
        allocators: by name, the one that decides first.
        remedies: whether to try remedies, some tens of runs; None: if the job does not fit.
        largest: whether to search for the largest batch; None: if a limit is given.
        most_seconds: processor seconds after which no further remedy is tried.
        progress: called with the name of each trial.

    Raises:
        UsageError: as `fit`.
    """
    result = estimate(job, limit_bytes, allocators=allocators, progress=progress)
    if limit_bytes is not None and largest is not False:
        result = with_largest_batch(job, result, progress=progress)
    if remedies or (remedies is None and result.fits is False):
        advice = advise(
            job, result, most_seconds=most_seconds, progress=lambda name: progress(f"what if {name}")
        )
        result = replace(result, advice=advice)
    return result


def call_arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (positional, named) arguments from a mapping, a tuple or list, or a single value."""
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given), {}) if isinstance(given, (tuple, list)) else ((given,), {})


def batch_of(*given: Any, dim: int = 0) -> int | None:
    """Return the size of a dimension of the first tensor of sufficient rank; None without such a tensor."""
    for leaf in pytree.tree_leaves(given):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > dim:
            return int(leaf.size(dim))
    return None


def resizable(given: Any, batch: int | None, batch_dim: int = 0) -> Callable[[int], Any]:
    """Return a function that makes inputs for a batch size from a user's inputs.

    Args:
        given: a function of the batch size, which is returned, or example inputs, whose tensors are resized
            in the batch dimension if their size there is ``batch``.
        batch: size of the batch dimension of the examples.
        batch_dim: index of the batch dimension; the first dimension for tensors with fewer dimensions.
    """
    if callable(given) and not isinstance(given, (torch.Tensor, Mapping)):
        made: Callable[[int], Any] = given
        return made

    def of(size: int) -> Any:
        if size == batch:
            return given
        if batch is None:
            raise UsageError("no input tensor has a batch dimension: give a function of the batch's size")
        return pytree.tree_map_only(torch.Tensor, lambda t: _resized(t, batch, size, batch_dim), given)

    return of


def _resized(tensor: torch.Tensor, batch: int, size: int, batch_dim: int) -> torch.Tensor:
    """Return a tensor of another batch size without values, with the same memory order of dimensions."""
    dim = batch_dim if tensor.dim() > batch_dim else 0
    if tensor.dim() == 0 or tensor.size(dim) != batch:
        return tensor
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))
    made = torch.empty_permuted(shape, order, dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def _sequence_first(model: nn.Module) -> list[str]:
    """Return the types of the model's modules whose inputs have the length before the batch."""
    found = [
        type(module).__name__ for module in model.modules() if getattr(module, "batch_first", True) is False
    ]
    return list(dict.fromkeys(found))


def _batch_doubt(modules: list[str], inputs: Any, batch: int) -> str | None:
    """Return the reason why example inputs cannot be resized along their first dimension, or None.

    Args:
        modules: types of the model's modules that take the length first, from `_sequence_first`.
        inputs: the examples.
        batch: size of the first dimension of the first tensor.
    """
    leaves = pytree.tree_leaves(inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    if modules and any(tensor.dim() == 3 for tensor in tensors):
        return f"{modules[0]} takes the length first"
    odd = next((tuple(tensor.shape) for tensor in tensors if tensor.size(0) != batch), None)
    return None if odd is None else f"an input of {odd} does not begin with the batch of {batch:,}"
