"""Fake run: runs a job on tensors without memory, and records the trace of a real run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from mempool.errors import UsageError
from mempool.recording.torch import AccessRecorder
from mempool.torch.estimate.checkpointing import Checkpointing
from mempool.torch.estimate.device.emulation import emulate_device, replaced
from mempool.torch.estimate.failures import explain_failures
from mempool.torch.estimate.fake.copies import fake_model, tensors_in, to_fake
from mempool.torch.estimate.fake.isolation import isolated
from mempool.torch.estimate.fake.mode import ValuelessMode, fake_mode
from mempool.torch.estimate.result import RECURRENT

SUMMED = (
    "no loss was given and the model returns none: the sum of its floating outputs stands for it; "
    "a real loss, such as cross entropy, may need more memory"
)
#: Fields of transformers outputs with keys and values, or the state, of the tokens so far.
_CACHES = ("cache", "past_key_values", "past_key_value", "cache_params", "past_buckets_states", "mems")
READS_VALUES = (
    "the optimizer looks at values, which there are none of: what it needs is taken not to depend on them"
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._subclasses.fake_tensor import FakeTensorMode

    from mempool.torch.estimate.job import Job
    from traces import Trace


def run(
    job: Job,
    steps: int = 2,
    *,
    warn: Callable[[str], object] = lambda _: None,
    clock: Callable[[Any, Any, Any, Any], int] | None = None,
) -> Trace:
    """Run some steps of a job without a GPU and without memory.

    Afterwards, random states, defaults and modes of the process are restored, and ``functools`` caches with
    fake tensors are emptied. Other state of the job's own code remains, such as a list filled by hooks or a
    dictionary of masks in a module.

    Args:
        job: the job.
        steps: number of steps; the first makes the optimizer's state, the second is in steady state.
        warn: called with sources of uncertainty.
        clock: returns the time of an operation on the device, for `AccessRecorder`; None: no time.

    Returns:
        The trace: earlier buffers, then the steps, each with marks "forward", "backward", "optimizer" and a
        final "step"; with categories, modules, operations and unrounded sizes.

    Raises:
        UsageError: the run fails; the message names the location and, for known cases, the remedy.
    """
    with (
        isolated(),
        fake_mode() as mode,
        emulate_device(job.device, capability=job.capability, warn=warn),
        explain_failures(f"trying a step without memory, mode {job.mode}") as running,
    ):
        model = _model(job)
        running.append(model)
        if job.device == "cuda" and any(isinstance(module, nn.RNNBase) for module in model.modules()):
            warn(RECURRENT)
        optimizers = [] if job.mode == "inference" else [_optimizer(job, model)]
        with AccessRecorder([model], optimizers, clock=clock) as recorder:
            take = _steps(job, model, optimizers, mode, recorder, warn)
            for _ in range(steps):
                next(take)
                recorder.step()
            del take
    trace = recorder.trace()
    of = {"clock": "none" if clock is None else "modelled"}
    return dataclasses.replace(trace, metadata=dict(trace.metadata) | of)


def _inputs(job: Job, recorder: AccessRecorder) -> Iterator[tuple[Any, ...]]:
    """Yield batches as a loader does: the next batch exists before the previous batch is freed."""
    while True:
        args = to_fake(job.inputs(job.batch))
        if job.dtype is not None and job.autocast is None:  # operations require one type
            args = pytree.tree_map_only(
                torch.Tensor, lambda t: t.to(job.dtype) if t.is_floating_point() else t, args
            )
        batch = (*args, to_fake(job.labels and job.labels(job.batch)))
        recorder.own("inputs", _tensors(batch))
        yield batch


def _model(job: Job) -> nn.Module:
    """Return the model of a job on tensors without memory."""
    model = fake_model(job.model, job.dtype)
    model.train(job.mode == "train")
    if job.checkpoint:
        if (found := Checkpointing.of(model)) is None:
            raise UsageError("nothing to checkpoint: the model has no repeated blocks")
        # On CUDA the state of random numbers is kept on the host.
        found.apply(model, preserve_rng_state=job.device == "cpu")
    return model


def _optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the model's parameters that require gradients."""
    assert job.optimizer is not None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UsageError("no parameter of the model requires a gradient: there is nothing to train")
    return job.optimizer(trained)


@contextlib.contextmanager
def _numbers_read_as_one(mode: FakeTensorMode, warn: Callable[[str], object]) -> Iterator[None]:
    """Permit an optimizer to read values, which affect its arithmetic but not the memory."""

    def guess(tensor: torch.Tensor) -> Any:
        warn(READS_VALUES)
        return False if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1

    with replaced(mode, "on_read", guess) if isinstance(mode, ValuelessMode) else contextlib.nullcontext():
        yield


def _steps(
    job: Job,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    mode: FakeTensorMode,
    recorder: AccessRecorder,
    warn: Callable[[str], object],
) -> Iterator[None]:
    """Run one step of a loop per iteration: of a training or, without optimizers, of an inference."""
    inputs, trains = _inputs(job, recorder), bool(optimizers)
    held: list[Any] = [None, None]  # variables of the loop: output and loss
    while True:
        for args, kwargs, labels in itertools.islice(inputs, job.accumulate if trains else 1):
            with torch.set_grad_enabled(trains), _forward_context(job):
                output = model(*args, **kwargs)
                recorder.own("key_value_cache", _cache_tensors(output))
                held[0] = output if job.holds_output else None
                loss = loss_of(job, output, labels, warn) if trains else None
                del output
            if loss is not None:
                if job.accumulate > 1:
                    loss = loss / job.accumulate
                held[1] = loss if job.holds_output else None
                loss.backward()
                del loss
        for optimizer in optimizers:
            with _numbers_read_as_one(mode, warn):
                optimizer.step()
            optimizer.zero_grad()
        yield


def loss_of(job: Job, output: Any, labels: Any, warn: Callable[[str], object]) -> torch.Tensor:
    """Return a scalar loss with a gradient.

    Raises:
        UsageError: the output and the job give no such loss.
    """
    if job.loss is not None:
        loss = job.loss(output) if job.labels is None else job.loss(output, labels)
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"the loss is a {type(loss).__name__}, not a tensor")
    else:
        loss = _own_loss(output)
        if loss is None:
            loss = _summed(output)
            warn(SUMMED)
    if not loss.requires_grad:
        raise UsageError("the loss depends on no parameter that is trained: nothing to go backward through")
    return loss if loss.dim() == 0 else loss.sum()


def _own_loss(output: Any) -> torch.Tensor | None:
    """Return an output's own loss: its ``loss``, as in transformers, or the output itself."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if found is None and isinstance(output, torch.Tensor) and output.dim() == 0:
        found = output
    return found if isinstance(found, torch.Tensor) else None


def _summed(output: Any) -> torch.Tensor:
    """Return the sum of an output's tensors with a gradient, as a substitute for a loss.

    Raises:
        UsageError: the output has no such tensor.
    """
    parts = [
        (torch.view_as_real(leaf) if leaf.is_complex() else leaf).sum()
        for leaf in pytree.tree_leaves(_plain(output))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if not parts:
        raise UsageError("the model's output has no tensor with a gradient: give loss=")
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _plain(output: Any) -> Any:
    """Convert an output to plain containers: the items of an iterator, the attributes of an object."""
    if isinstance(output, (torch.Tensor, dict, list, tuple)):
        return output
    if hasattr(output, "__next__"):
        return list(output)
    return dict(vars(output)) if hasattr(output, "__dict__") else output


def _cache_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors of the key-value cache in an output of transformers, by name or in a tuple."""
    if isinstance(output, (tuple, list)):
        found = [part for part in output if type(part).__name__.endswith("Cache")]
    else:
        fields = output if isinstance(output, dict) else getattr(output, "__dict__", {})
        found = [fields[name] for name in list(fields) if name in _CACHES]
    return tensors_in(*found, outside=(nn.Module,))


@contextlib.contextmanager
def _forward_context(job: Job) -> Iterator[None]:
    """Compute in the job's precision; keep saved tensors on the host if the job requests this."""
    with contextlib.ExitStack() as stack:
        if job.autocast is not None:
            stack.enter_context(torch.autocast("cpu", dtype=job.autocast))
        if job.save_on_cpu:  # unpacking allocates a copy on the device
            hooks = (lambda t: (t.shape, t.dtype)), (lambda kept: torch.empty(kept[0], dtype=kept[1]))
            stack.enter_context(saved_tensors_hooks(*hooks))
        yield


def _tensors(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
