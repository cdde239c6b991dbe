"""Shape rules: meta results of frequent operations, from their arguments' sizes, without running PyTorch.

PyTorch needs a millisecond for a meta result, often by decomposing the operation, for each new combination of
sizes. The rules cover only dense tensors of one type, as most networks have; for all other arguments a rule
returns None, and PyTorch computes the result.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from mempool.torch.estimate.fake.meta_results import Answer, Made, alone, dense, like, new

if TYPE_CHECKING:
    from collections.abc import Callable

_aten = torch.ops.aten


def _is_dense(*tensors: Any) -> bool:
    """Return whether all are contiguous, non-empty floating-point tensors of one type."""
    return all(
        type(t) is FakeTensor
        and t.dtype.is_floating_point
        and t.dtype is tensors[0].dtype
        and 0 not in t.shape
        and t.is_contiguous()
        for t in tensors
    )


def _pointwise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
    """Return the result of a pointwise operation on tensors of one shape, and numbers."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if not tensors or not _is_dense(*tensors) or {len(t.shape) for t in tensors} == {0}:
        return None
    if any(t.shape != tensors[0].shape for t in tensors):
        return None
    plain = all(isinstance(value, (torch.Tensor, int, float, str)) for value in (*args, *kwargs.values()))
    return alone(new(tensors[0].shape, tensors[0].dtype)) if plain else None


def _same_view(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
    (x,) = args
    return None if kwargs else alone(Made(0, tuple(x.shape), x.stride(), x.dtype, x.storage_offset()))


def _view(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
    x, size = args
    if kwargs or 0 in x.shape or not x.is_contiguous() or size.count(-1) > 1:
        return None
    known = math.prod(s for s in size if s != -1)
    if known <= 0 or x.numel() % known or (-1 not in size and x.numel() != known):
        return None
    shape = tuple(x.numel() // known if s == -1 else s for s in size)
    return alone(Made(0, shape, dense(shape), x.dtype, x.storage_offset()))


def _transpose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
    x, *dims = args
    if kwargs or (not dims and x.dim() != 2) or x.dim() < 2:
        return None
    one, other = dims or (0, 1)
    if not all(-x.dim() <= dim < x.dim() for dim in (one, other)):
        return None
    shape, stride = list(x.shape), list(x.stride())
    for values in (shape, stride):
        values[one], values[other] = values[other], values[one]
    return alone(Made(0, tuple(shape), tuple(stride), x.dtype, x.storage_offset()))


def _product(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
    """Return the result of a matrix product, with a vector added for addmm."""
    *added, one, other = args
    dtypes = {t.dtype for t in args}
    if kwargs or len(dtypes) > 1 or not one.dtype.is_floating_point:
        return None
    if one.dim() != 2 or other.dim() != 2 or one.shape[1] != other.shape[0]:
        return None
    shape = (one.shape[0], other.shape[1])
    usual = all(t.dim() == 1 and t.shape[0] == shape[1] for t in added)
    return alone(new(shape, one.dtype)) if usual and 0 not in (*one.shape, *other.shape) else None


#: Values of the arguments of `empty_like` and similar operations for which the rule holds.
_USUAL = {
    "memory_format": (None, torch.preserve_format),
    "device": (None, torch.device("cpu")),
    "layout": (None, torch.strided),
    "pin_memory": (None, False),
}


def _like(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
    (x,) = args
    usual = _is_dense(x) and all(kwargs[name] in _USUAL[name] for name in kwargs if name != "dtype")
    return alone(new(x.shape, kwargs.get("dtype") or x.dtype)) if usual else None


def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
    x, weight, bias, mean, var, training, _, _ = args
    if kwargs or not _is_norm(x, weight, bias, mean, var) or (not training and None in (mean, var)):
        return None
    channels = new([x.shape[1] if training else 0], x.dtype)
    return Answer(tuple, (like(x), channels, channels))


def _batch_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
    gradient, x, weight, mean, var, save_mean, save_invstd, training, _, mask = args
    used = (save_mean, save_invstd) if training else (mean, var)
    if kwargs or None in used or not _is_norm(x, weight, *used) or not _is_norm(gradient):
        return None
    if gradient.shape != x.shape or gradient.dtype != x.dtype:
        return None
    channels = new([x.shape[1]], (x if weight is None else weight).dtype)
    return Answer(tuple, (like(x), *(channels if asked else None for asked in mask[1:])))


def _is_norm(x: Any, *channels: Any) -> bool:
    """Return whether x is dense with several values per channel, and the others are channel vectors."""
    return (
        _is_dense(x)
        and x.dim() >= 2
        and x.numel() > x.shape[1]
        and all(v is None or (v.dim() == 1 and v.shape[0] == x.shape[1]) for v in channels)
    )


def _layer_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
    x, shape, weight, bias, _ = args
    last = list(shape)
    usual = x.dtype is torch.float32 and _is_dense(*(t for t in (x, weight, bias) if t is not None))
    if kwargs or not usual or not last or list(x.shape[-len(last) :]) != last:
        return None
    if any(t is not None and list(t.shape) != last for t in (weight, bias)):
        return None
    rows = new((*x.shape[: -len(last)], *(1 for _ in last)), x.dtype)
    return Answer(tuple, (new(x.shape, x.dtype), rows, rows))


def _dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
    x, p, train = args
    if kwargs or not _is_dense(x) or not x.dim() or not train or not 0 < p < 1:
        return None
    return Answer(tuple, (new(x.shape, x.dtype), new(x.shape, torch.bool)))


def _each(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
    """Return the result of a foreach operation on lists of tensors, element by element, and numbers."""
    lists = [value for value in args if isinstance(value, (list, tuple))]
    numbers = (*(value for value in args if not isinstance(value, (list, tuple))), *kwargs.values())
    if not lists or not lists[0] or not all(isinstance(value, (int, float)) for value in numbers):
        return None
    if any(len(value) != len(lists[0]) for value in lists):
        return None
    answers = [_pointwise(parts, {}) for parts in zip(*lists, strict=True)]
    if any(answer is None for answer in answers):
        return None
    return Answer(list, tuple(answer.parts[0] for answer in answers if answer is not None))


#: Pointwise operations on tensors and numbers whose result has the tensors' type.
_POINTWISE = """
    relu threshold_backward gelu gelu_backward silu silu_backward tanh tanh_backward sigmoid sigmoid_backward
    exp neg rsqrt sqrt add.Tensor sub.Tensor mul.Tensor div.Tensor mul.Scalar div.Scalar pow.Tensor_Scalar
    add.Scalar sub.Scalar
"""
_FOREACH = (
    "sqrt neg reciprocal add.Scalar sub.Scalar mul.Scalar div.Scalar add.List sub.List mul.List div.List"
)
RULES: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Answer | None]] = {
    **{
        getattr(getattr(_aten, packet), overload or "default"): _pointwise
        for packet, _, overload in (name.partition(".") for name in _POINTWISE.split())
    },
    **{
        getattr(getattr(_aten, f"_foreach_{packet}"), overload or "default"): _each
        for packet, _, overload in (name.partition(".") for name in _FOREACH.split())
    },
    _aten.detach.default: _same_view,
    _aten.alias.default: _same_view,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.t.default: _transpose,
    _aten.transpose.int: _transpose,
    _aten.mm.default: _product,
    _aten.addmm.default: _product,
    _aten.empty_like.default: _like,
    _aten.zeros_like.default: _like,
    _aten.ones_like.default: _like,
    _aten.native_batch_norm.default: _batch_norm,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_dropout.default: _dropout,
}
