"""Functions for users: estimates of a model or a job, and remedies if the job does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mempool.errors import UsageError
from mempool.recording.optimizers import hooked_optimizer
from mempool.torch.estimate.estimator import DEFAULT_ALLOCATORS, estimate, with_largest_batch
from mempool.torch.estimate.fake.isolation import shared_isolation
from mempool.torch.estimate.inputs import batch_doubt, batch_of, call_arguments, resizable, sequence_first
from mempool.torch.estimate.job import Job
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.estimate.remedies.advise import advise
from mempool.units import parse_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
            modules.extend(sequence_first(result))
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
        doubt = batch_doubt(modules, (inputs, labels), own_batch)
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
