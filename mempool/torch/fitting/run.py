"""A job tried on tensors that have no memory: what it would allocate, as a trace."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from mempool.torch.fitting.blocks import checkpointed
from mempool.torch.fitting.failures import told
from mempool.torch.fitting.fake import fake_mode
from mempool.torch.fitting.isolation import isolated
from mempool.torch.fitting.losses import loss_of
from mempool.torch.fitting.models import made_model, to_fake
from traces.recorders.torch import AccessRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from mempool.torch.fitting.job import Job
    from traces import Trace


def run(job: Job, steps: int = 2, *, warn: Callable[[str], object] = lambda _: None) -> Trace:
    """Try some steps of a job without a GPU and without memory.

    What the process has, its random numbers and defaults included, is afterwards as it was.

    Args:
        job: what is tried.
        steps: how many; the first one makes the optimizer's state, the second is like all that follow.
        warn: called with what makes the answer less certain.

    Returns:
        The trace: buffers alive from before, then the steps, each ended by a mark "step", with "forward",
        "backward" and "optimizer" between; categories, modules and operations. Sizes are not rounded.

    Raises:
        UsageError: the job cannot be tried; the message names where and, for what is known, the remedy.
    """
    with isolated(), fake_mode(), told(job) as watch:
        made = _Made.of(job)
        watch.model = made.model
        with _recorder(made) as recorder:
            inputs = _inputs(job, recorder)
            take = _train(job, made, inputs, warn) if job.mode == "train" else _infer(job, made, inputs)
            for _ in range(steps):
                next(take)
                recorder.step()
            del take
    trace: Trace = recorder.trace()
    return trace


def _inputs(job: Job, recorder: AccessRecorder) -> Iterator[tuple[Any, ...]]:
    """Batch after batch, as a loader brings them: a new one is there before the last one goes."""
    while True:
        batch = to_fake((*job.inputs(job.batch), job.labels and job.labels(job.batch)))
        recorder.own("inputs", _tensors(batch))
        yield batch


@dataclass
class _Made:
    """What a job makes."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]

    @classmethod
    def of(cls, job: Job) -> _Made:
        model = made_model(job.model, job.dtype)
        model.train(job.mode == "train")
        if job.checkpoint:
            checkpointed(model, job.checkpoint)
        optimizers = [] if job.optimizer is None or job.mode == "inference" else [_optimizer(job, model)]
        if job.mode == "eval":
            for optimizer in optimizers:
                _make_state(optimizer)
        return cls(model, optimizers)


def _recorder(made: _Made) -> Any:
    try:
        return AccessRecorder([made.model], made.optimizers)  # type: ignore[call-arg]
    except TypeError:
        return _StandIn(made)


class _StandIn(AccessRecorder):  # until the recorder knows modules and optimizers
    def __init__(self, made: _Made) -> None:
        super().__init__()
        self.made = made

    def __enter__(self) -> Any:
        super().__enter__()
        self.made.model.register_forward_pre_hook(lambda *_: self.mark("forward"))
        self.made.model.register_forward_hook(lambda *_: self.mark("backward"))
        for optimizer in self.made.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._before())
            optimizer.register_step_post_hook(lambda o, *_: self._after(o))
        self.own("parameters", self.made.model.parameters())
        self.own("module_buffers", self.made.model.buffers())
        return self

    def step(self) -> None:
        self.mark("step")

    def _before(self) -> None:
        self.mark("optimizer")
        self.own("gradients", [p.grad for p in self.made.model.parameters() if p.grad is not None])

    def _after(self, optimizer: Any) -> None:
        states = [list(v.values()) for v in optimizer.state.values()]
        self.own("optimizer_state", _tensors(states))


def _optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    assert job.optimizer is not None
    made = job.optimizer(p for p in model.parameters() if p.requires_grad)
    for group in made.param_groups if job.device == "cuda" else ():
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True  # what PyTorch takes of itself for parameters on CUDA
    return made


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """As a first step of training leaves it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _train(
    job: Job, made: _Made, inputs: Iterator[tuple[Any, ...]], warn: Callable[[str], object]
) -> Iterator[None]:
    (optimizer,) = made.optimizers
    held: list[Any] = [None, None]  # what the variables of a loop hold on to: output and loss
    while True:
        for _, (args, kwargs, labels) in zip(range(job.accumulate), inputs, strict=False):
            with _precision(job):
                output = made.model(*args, **kwargs)
                held[0] = output if job.hold_output else None
                loss = loss_of(job, output, labels, warn)
                del output
            if job.accumulate > 1:
                loss = loss / job.accumulate
            held[1] = loss if job.hold_output else None
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=job.set_to_none)
        yield


def _infer(job: Job, made: _Made, inputs: Iterator[tuple[Any, ...]]) -> Iterator[None]:
    held: list[Any] = [None]
    for args, kwargs, _ in inputs:
        with torch.no_grad(), _precision(job):
            output = made.model(*args, **kwargs)
        held[0] = output if job.hold_output else None
        del output
        yield


def _precision(job: Job) -> contextlib.AbstractContextManager[Any]:
    if job.autocast is None:
        return contextlib.nullcontext()
    lower: contextlib.AbstractContextManager[Any] = torch.autocast("cpu", dtype=job.autocast)
    return lower


def _tensors(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
