"""Rejection sampling in ``trunc_normal_`` for tensors without values, which would otherwise never end.

PyTorch's own function runs, so that its allocations are recorded; only the reads of the draws are answered,
with the most likely result. Versions of PyTorch that compute the values without such reads run unchanged.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOK_AT = torch.ops.aten._local_scalar_dense.default


@contextlib.contextmanager
def drawn_blindly() -> Iterator[None]:
    """Let ``trunc_normal_`` fill fake tensors while the block runs; real tensors get their values."""
    before = nn.init._no_grad_trunc_normal_

    def draw(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            if isinstance(tensor, FakeTensor):
                stack.enter_context(_Outcome(_draws_again(tensor.numel(), mean, std, a, b)))
            made: torch.Tensor = before(tensor, mean, std, a, b, *args, **kwargs)
        return made

    nn.init._no_grad_trunc_normal_ = draw
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = before


def _draws_again(count: int, mean: float, std: float, a: float, b: float) -> int:
    """Return the likely number of draws out of bounds, at most 2: more take no more memory."""
    low, high = ((bound - mean) / (std * math.sqrt(2)) if std else math.inf for bound in (a, b))
    outside = 1 - (math.erf(high) - math.erf(low)) / 2
    return sum(count * outside**draws >= 1 for draws in (1, 2))


class _Outcome(TorchDispatchMode):
    """Dispatch mode that answers "some values are out of bounds" a number of times, then "none are"."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._left = times

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _LOOK_AT and args[0].dtype is torch.bool:
            self._left -= 1
            return self._left >= 0
        return func(*args, **(kwargs or {}))
