"""Training steps under the recorder, and simple views of traces."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from models import MODELS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mempool.recording.torch import AccessRecorder
from traces import EventType, Trace


class Step(nn.Module):
    """A module that returns the loss of a model, so that the whole forward pass is in one module."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: Any) -> Any:
        return self.model.loss(*batch)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def train(
    name: str,
    mode: Callable[[nn.Module, torch.optim.Optimizer, Any], Any],
    *,
    fake: bool,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    steps: int = 2,
    after: Callable[[Any], None] = lambda _: None,
    **attributes: Any,
) -> Any:
    """Train a model for some steps under a mode; return the mode."""
    torch.manual_seed(0)
    with FakeTensorMode() if fake else contextlib.nullcontext():
        model = MODELS[name]()
        for key, value in attributes.items():
            setattr(model, key, value)
        step = Step(model)
        made = optimizer(step.parameters())
        batches = [model.batch(number, 2) for number in range(steps)]
        with mode(step, made, batches) as entered:
            for batch in batches:
                step(*batch).backward()
                made.step()
                made.zero_grad()
                after(entered)
    return entered


def recorder(step: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> Any:
    """Return the context of a recorder that knows the batches as inputs."""

    @contextlib.contextmanager
    def entered() -> Any:
        with AccessRecorder([step], [optimizer]) as made:
            made.own("inputs", [tensor for batch in batches for tensor in batch])
            yield made

    return entered()


def event_tuples(trace: Trace) -> list[tuple[Any, ...]]:
    """Return (kind, buffer, size, operation, category) of each event."""
    trace.validate()
    names = (*trace.names, None)
    return [
        (EventType(kind).name, buffer, size, names[operation], names[category])
        for kind, buffer, size, operation, category in zip(
            *(getattr(trace, name).tolist() for name in ("kind", "buffer", "size", "operation", "category")),
            strict=True,
        )
    ]


def marks(trace: Trace) -> list[str]:
    return [trace.names[name] for name in trace.operation[trace.kind == EventType.MARK]]


def buffer_counts(trace: Trace, column: str = "category") -> Counter[str | None]:
    """Count the buffers of each category, module or operation."""
    names = (*trace.names, None)
    return Counter(names[one] for one in getattr(trace, column)[trace.kind == EventType.ALLOC])


def accesses(trace: Trace) -> list[tuple[str, str | None, int]]:
    """Return (kind, operation, size of the buffer) of each read and write."""
    sizes = {event[1]: event[2] for event in event_tuples(trace) if event[0] == "ALLOC"}
    return [
        (kind, operation, sizes[buffer])
        for kind, buffer, _, operation, _ in event_tuples(trace)
        if kind in ("READ", "WRITE")
    ]
