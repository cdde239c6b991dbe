"""What batch norm answers with, where nothing is computed.

PyTorch takes it apart into some twenty operations to learn shapes that are told here at once. Only for what
convolutional nets do; all else goes PyTorch's way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Callable

_aten = torch.ops.aten


def _forward(call: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    x, weight, bias, mean, var, training, _, _ = given
    if not _is_usual(x, weight, bias, mean, var) or (not training and None in (mean, var)):
        return None
    shape = [x.shape[1] if training else 0]
    return (
        call(_aten.empty_like.default, x),
        call(_aten.new_empty.default, x, shape),
        call(_aten.new_empty.default, x, shape),
    )


def _backward(call: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    gradient, x, weight, mean, var, save_mean, save_invstd, training, _, mask = given
    used = (save_mean, save_invstd) if training else (mean, var)
    if None in used or not _is_usual(x, weight, *used) or not _is_usual(gradient):
        return None
    if gradient.shape != x.shape or gradient.dtype != x.dtype:
        return None
    of_weight, of_bias = (
        call(_aten.new_empty.default, x if weight is None else weight, [x.shape[1]]) if asked else None
        for asked in mask[1:]
    )
    return call(_aten.empty_like.default, x), of_weight, of_bias


def _is_usual(x: Any, *channels: Any) -> bool:
    """Whether these are a dense floating tensor, of some values a channel, and vectors of its channels."""
    return (
        type(x) is FakeTensor
        and x.dim() >= 2
        and all(type(size) is int and size > 0 for size in x.shape)
        and x.numel() > x.shape[1]
        and x.is_contiguous()
        and x.dtype.is_floating_point
        and all(v is None or (v.dim() == 1 and v.shape[0] == x.shape[1]) for v in channels)
    )


#: Of an operation: what it answers with, given what calls an operation and its arguments; None: ask PyTorch.
ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten.native_batch_norm.default: _forward,
    _aten.native_batch_norm_backward.default: _backward,
}
