"""Traces of training steps on fake tensors, whose clock is a roofline: operations and bytes touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from traces.recorders.torch import AccessRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from traces import Trace


@dataclass(frozen=True)
class Profile:
    """What a device does in a second; an operation takes the longer of its two times."""

    flops: float
    bandwidth: float

    def nanoseconds(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """What an operation takes: a clock of `AccessRecorder`."""
        written = _written(func, args)
        given = {id(s): s.nbytes() for s in _storages((args, kwargs))}
        made = {id(s): s.nbytes() for s in _storages(result) if id(s) not in given}
        if not made and not written:
            return 0  # a view
        counts = flop_registry.get(func.overloadpacket)
        flops = 0 if counts is None else counts(*args, **kwargs, out_val=result)
        # What is written in place is read before.
        moved = sum(given.values()) + sum(made.values()) + sum(given[one] for one in written)
        return round(1e9 * max(flops / self.flops, moved / self.bandwidth))


def _storages(values: Any) -> list[Any]:
    return [tensor.untyped_storage() for tensor in tree_iter(values) if isinstance(tensor, torch.Tensor)]


def _written(func: Any, args: Any) -> set[int]:
    """The storages among the arguments that an operation writes."""
    says = zip(args, func._schema.arguments, strict=False)
    return {
        id(storage)
        for given, said in says
        if said.alias_info is not None and said.alias_info.is_write
        for storage in _storages(given)
    }


def training_trace(
    model: Callable[[], torch.nn.Module],
    shape: tuple[int, ...],
    profile: Profile,
    *,
    momentum: float = 0.9,
    steps: int = 4,
) -> Trace:
    """SGD with momentum, gradients set to none after the update; the batch is made anew for each step."""
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
