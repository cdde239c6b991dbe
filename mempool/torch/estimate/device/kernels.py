"""Dispatcher overrides for functions that CUDA computes differently than the CPU, for fake tensors.

PyTorch composes these functions from others, depending on the device. Here each has a kernel at the
dispatcher's key for autograd on the CPU, so that all callers are served, including C++ and
`torch.nn.functional`. Real tensors go the usual way.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import linear

from mempool.torch.estimate.device import attention, recurrent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from mempool.torch.estimate.device.emulation import Target

_aten = torch.ops.aten


@contextlib.contextmanager
def overriding(key: str, kernels: Mapping[str, Any]) -> Iterator[None]:
    """Let the dispatcher call these kernels, in the whole process, while the block runs.

    Args:
        key: of the dispatcher, such as "AutogradCPU".
        kernels: by operator name, with the overload behind a dot.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overriding a kernel is intended here
            for name, kernel in kernels.items():
                library.impl(name, kernel, key, allow_override=True)  # blocks may be nested
        yield
    finally:
        library._destroy()


def of_cuda(target: Target) -> dict[str, Callable[..., Any]]:
    """Return the kernels of a target, by operator name."""
    ours: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": lambda *args, **kwargs: _attention(target, *args, **kwargs),
        "dropout": _dropout,
        "softmax.int": lambda *args, **kwargs: _softmax(_aten._softmax, *args, **kwargs),
        "log_softmax.int": lambda *args, **kwargs: _softmax(_aten._log_softmax, *args, **kwargs),
        "lstm_cell": _lstm_cell,
        **{f"{kind}.{form}": _recurrent(kind) for kind in recurrent.KEPT for form in ("input", "data")},
    }
    return {name: _of_fake_only(name, kernel) for name, kernel in ours.items()}


def _of_fake_only(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel: use PyTorch's own for real tensors, and if the kernel returns NotImplemented."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(_aten, packet), overload or "default")
    usual = torch._C.DispatchKey.CompositeImplicitAutograd  # the C++ form, not a decomposition in Python

    def chosen(*args: Any, **kwargs: Any) -> Any:
        made = kernel(*args, **kwargs) if isinstance(args[0], FakeTensor) else NotImplemented
        return operator._op_dk(usual, *args, **kwargs) if made is NotImplemented else made

    return chosen


def _attention(target: Target, *args: Any, **kwargs: Any) -> Any:
    asked = attention.Asked(*args, **kwargs)
    return NotImplemented if asked.query.is_nested else attention.attend(asked, target)


def _dropout(tensor: Tensor, p: float, train: bool) -> Any:  # noqa: FBT001 - the operator's own
    """Follow `is_fused_kernel_acceptable` in `ATen/native/Dropout.cpp`."""
    fused = train and 0 < p < 1 and tensor.numel() > 0
    return torch.native_dropout(tensor, p, train)[0] if fused else NotImplemented


def _softmax(kernel: Any, tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Convert float16 to float32 in the same kernel (`ATen/native/SoftMax.cpp`)."""
    fused = tensor.dtype == torch.float16 and dtype == torch.float32
    return kernel(tensor, dim, half_to_float=True) if fused else NotImplemented


def _lstm_cell(
    inputs: Tensor, states: list[Tensor], w_ih: Tensor, w_hh: Tensor, *biases: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute two products and one kernel, which keeps the gates (`ATen/native/RNN.cpp`)."""
    products = linear(inputs, w_ih), linear(states[0], w_hh)
    rest = [t if t is None else t.to(products[0].dtype) for t in (states[1], *biases)]
    hidden, cell, _ = _aten._thnn_fused_lstm_cell(*products, *rest)
    return hidden, cell


def _recurrent(kind: str) -> Callable[..., Any]:
    return lambda *args: recurrent.layer(kind, *args)
