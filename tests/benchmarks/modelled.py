"""Traces of training steps on fake tensors, whose clock is a roofline: operations and bytes touched."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from mempool.hardware.roofline import Roofline
from mempool.recording.torch import AccessRecorder
from traces import Trace


def training_trace(
    model: Callable[[], torch.nn.Module],
    shape: tuple[int, ...],
    profile: Roofline,
    *,
    momentum: float = 0.9,
    steps: int = 4,
) -> Trace:
    """Return the trace of training steps with SGD with momentum.

    Each step has a new batch and new gradients.
    """
    with FakeTensorMode():
        net = model()
        parameters = net.parameters()
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=momentum, weight_decay=5e-4, foreach=False)
        recorder = AccessRecorder([net], [optimizer], clock=profile.nanoseconds)
        with recorder:
            for _ in range(steps):
                x = torch.empty(shape)
                y = torch.empty(shape[0], dtype=torch.int64)
                loss = functional.cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                del x, y, loss
                recorder.step()
        return recorder.trace()
