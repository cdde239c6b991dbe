"""Dispatcher overrides, for fake tensors, of functions that allocate differently on CUDA and CPU.

PyTorch composes these functions from others, depending on the device. Here each function has a kernel at the
dispatcher's key for autograd on the CPU, so that all callers use it, including C++ and `torch.nn.functional`.
Real tensors use PyTorch's own kernels.

Attention: a fused kernel keeps the output and a sum for each query, the unfused form keeps all scores; their
peaks differ by tens of percent. `is_fused` has the conditions of FlashAttention and of the memory-efficient
kernel (`ATen/native/transformers/cuda/sdp_utils.cpp`). cuDNN's attention, which Hopper prefers, needs as much
memory as these two. If only cuDNN's kernel can run, the estimate assumes the unfused form, which needs more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """Arguments of one attention call; shapes are (batch, heads, length, width)."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def is_fused(call: AttentionCall, capability: tuple[int, int]) -> bool:
    """Return whether a fused kernel can run, given the user's switches (`torch.nn.sdpa_kernel`).

    Args:
        call: the call.
        capability: the compute capability: (8, 0) is an A100, (9, 0) an H100.
    """
    q, k, v = call.query, call.key, call.value
    if not q.dim() == k.dim() == v.dim() == 4 or not q.dtype == k.dtype == v.dtype:
        return False
    if not q.shape[0] == k.shape[0] == v.shape[0] or 0 in (q.shape[2], k.shape[2]):
        return False
    if q.shape[-1] != k.shape[-1] or any(t.stride(-1) != 1 for t in (q, k, v)):
        return False
    return _flash(call, capability) or _efficient(call, capability)


def _flash(call: AttentionCall, capability: tuple[int, int]) -> bool:
    q, k, v = call.query, call.key, call.value
    grouped = call.enable_gqa and k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and capability >= (8, 0)
        and call.attn_mask is None
        and q.dtype in _HALF
        and q.shape[-1] == v.shape[-1] <= 256
        and (grouped or q.shape[1] == k.shape[1] == v.shape[1])
        and not (call.is_causal and q.shape[2] != k.shape[2])
    )


def _efficient(call: AttentionCall, capability: tuple[int, int]) -> bool:
    q, v = call.query, call.value
    half, modern = q.dtype in _HALF, capability >= (8, 0)
    types = (torch.float32, torch.float16, *([torch.bfloat16] if modern else []))
    alignment = 8 if half and capability >= (7, 0) else 4 if modern else 1
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and q.dtype in types
        and q.shape[1] == call.key.shape[1] == v.shape[1]
        and all(t.shape[-1] > 0 and t.shape[-1] % alignment == 0 for t in (q, v))
    )


def attention(call: AttentionCall, capability: tuple[int, int]) -> Tensor:
    """Return the result of attention, with the buffers of CUDA's kernel."""
    if not is_fused(call, capability):
        more = (call.attn_mask, call.dropout_p, call.is_causal, None)
        unfused: Tensor = _aten._scaled_dot_product_attention_math(
            call.query, call.key, call.value, *more, scale=call.scale, enable_gqa=call.enable_gqa
        )[0]
        return unfused
    mask = call.attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=call.query.dtype))
    inputs, width = (call.query, call.key, call.value), call.value.shape[-1]
    if call.query.dtype in _HALF and width % 8:
        inputs = tuple(pad(t, (0, 8 - width % 8)) for t in inputs)
    fused: Tensor = _Fused.apply("flash" if _flash(call, capability) else "efficient", *inputs, mask)
    return fused[..., :width]


class _Fused(torch.autograd.Function):
    """Fused attention: keeps its inputs, the output and a sum for each query, but no scores."""

    @staticmethod
    def forward(
        ctx: Any, kernel: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        out = _new(query, kernel, value.shape[-1])
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, mask, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, *_rest = ctx.saved_tensors
        room = _scratch(query, key)
        grads = [_new(tensor, ctx.kernel, tensor.shape[-1]) for tensor in (query, key, value)]
        del room
        return (None, *grads, torch.empty_like(mask) if ctx.needs_input_grad[4] else None)


def _new(tensor: Tensor, kernel: str, width: int) -> Tensor:
    """Return a new tensor: FlashAttention keeps the memory order; the other kernel puts heads third."""
    if kernel == "flash":
        return torch.empty_like(tensor)
    batch, heads, length, _ = tensor.shape
    return tensor.new_empty(batch, length, heads, width).transpose(1, 2)


def _scratch(query: Tensor, key: Tensor) -> list[Tensor]:
    """Return the scratch buffers of the backward kernel, as of FlashAttention 2 (`flash_api.cpp`).

    These are the gradient of the query in 32 bits and a sum for each query, both for lengths rounded up to
    128, and with grouped heads the gradients of keys and values for all heads.
    """
    batch, heads, length, width = query.shape
    rows = -(-length // 128) * 128
    found = [query.new_empty(batch, rows, heads, width + 1, dtype=torch.float32)]
    if key.shape[1] != heads:
        found += [query.new_empty(batch, key.shape[2], heads, width) for _ in range(2)]
    return found


@contextlib.contextmanager
def override_kernels(key: str, kernels: Mapping[str, Any]) -> Iterator[None]:
    """Override kernels of the dispatcher, in the whole process, while the block runs.

    Args:
        key: key of the dispatcher, such as "AutogradCPU".
        kernels: by operator name, with the overload behind a dot.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overrides are intended
            for name, kernel in kernels.items():
                library.impl(name, kernel, key, allow_override=True)  # blocks may be nested
        yield
    finally:
        library._destroy()


def cuda_kernels(capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    """Return the kernels of CUDA, by operator name."""
    overrides: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": lambda *args, **kwargs: _attention(capability, *args, **kwargs),
        "dropout": _dropout,
    }
    return {name: for_fake_tensors(name, kernel) for name, kernel in overrides.items()}


def for_fake_tensors(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel: call PyTorch's own for real tensors, and after NotImplemented."""
    operator = getattr(_aten, name).default
    usual = torch._C.DispatchKey.CompositeImplicitAutograd  # the C++ form, not a decomposition in Python

    def chosen(*args: Any, **kwargs: Any) -> Any:
        made = kernel(*args, **kwargs) if isinstance(args[0], FakeTensor) else NotImplemented
        return operator._op_dk(usual, *args, **kwargs) if made is NotImplemented else made

    return chosen


def _attention(capability: tuple[int, int], *args: Any, **kwargs: Any) -> Any:
    call = AttentionCall(*args, **kwargs)
    return NotImplemented if call.query.is_nested else attention(call, capability)


def _dropout(tensor: Tensor, p: float, train: bool) -> Any:  # noqa: FBT001 - the operator's own
    """Follow `is_fused_kernel_acceptable` in `ATen/native/Dropout.cpp`."""
    fused = train and 0 < p < 1 and tensor.numel() > 0
    return torch.native_dropout(tensor, p, train)[0] if fused else NotImplemented
