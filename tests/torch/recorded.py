"""Steps of training under the recorder, and what a trace holds, told simply."""

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
    """A model whose forward is its loss, so that all of it is inside one module."""

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
    """Some steps of a model under a mode, which is returned."""
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
    """A recorder that knows the batches from the beginning."""

    @contextlib.contextmanager
    def entered() -> Any:
        with AccessRecorder([step], [optimizer]) as made:
            made.own("inputs", [tensor for batch in batches for tensor in batch])
            yield made

    return entered()


def told(trace: Trace) -> list[tuple[Any, ...]]:
    """The events one by one: kind, number of the buffer by age, size, operation, category."""
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


def made(trace: Trace, column: str = "category") -> Counter[str | None]:
    """How many buffers of each category, module or operation there are."""
    names = (*trace.names, None)
    return Counter(names[one] for one in getattr(trace, column)[trace.kind == EventType.ALLOC])


def accesses(trace: Trace) -> list[tuple[str, str | None, int]]:
    """EventType, operation and the buffer's size of each read and write."""
    sizes = {event[1]: event[2] for event in told(trace) if event[0] == "ALLOC"}
    return [
        (kind, operation, sizes[buffer])
        for kind, buffer, _, operation, _ in told(trace)
        if kind in ("READ", "WRITE")
    ]
