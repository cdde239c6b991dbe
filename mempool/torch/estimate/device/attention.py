"""Scaled dot product attention as a CUDA device computes it, on fake tensors of the CPU.

On the CPU PyTorch takes another fused kernel, or the unfused one, which keeps the scores: the peaks of the
two differ by tens of percent. The choice of backend follows PyTorch 2.13,
`ATen/native/transformers/cuda/sdp_utils.cpp` (`select_sdp_backend` and its checks) and `sdp_utils_cpp.h`; the
treatment of masks and odd widths before the kernel follows `ATen/native/transformers/attention.cpp`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from mempool.torch.estimate.device.emulation import Target

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
#: Elements; rows of a mask must begin at multiples of this number: `mem_eff_alignment` of `attention.cpp`.
_MASK_ALIGNMENT = 8


@dataclasses.dataclass(frozen=True)
class Asked:
    """Arguments of one attention call; shapes are (batch, heads, length, width)."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def learns(self) -> bool:
        """Return whether a backward pass may follow."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def backend_of(asked: Asked, target: Target) -> str:
    """Return the backend that the target would take: "cudnn", "flash", "efficient" or "math".

    The user's switches count (`torch.nn.attention.sdpa_kernel`, `torch.backends.cuda.enable_*_sdp`).
    """
    order = [("flash", _flash), ("efficient", _efficient)]
    if target.prefers_cudnn_attention:
        order.insert(0, ("cudnn", _cudnn))
    if not _dense(asked):
        return "math"
    return next((name for name, can in order if can(asked, target)), "math")


def _dense(asked: Asked) -> bool:
    """Return whether types and shapes suit all fused kernels."""
    q, k, v = asked.query, asked.key, asked.value
    if not q.dim() == k.dim() == v.dim() == 4 or not q.dtype == k.dtype == v.dtype:
        return False
    return bool(q.shape[0] == k.shape[0] == v.shape[0] and q.shape[2] > 0 and k.shape[2] > 0)


def _heads(asked: Asked, *, grouped: bool) -> bool:
    q, k, v = (t.shape[1] for t in (asked.query, asked.key, asked.value))
    if asked.enable_gqa and grouped:
        return bool(k == v and q % k == 0)
    return bool(q == k == v)


def _dense_last(asked: Asked, *, one_is_well: bool) -> bool:
    """Return whether the last stride is 1, for the mask too."""
    inputs = (asked.query, asked.key, asked.value)
    good = all(t.stride(-1) == 1 for t in inputs) or (one_is_well and asked.query.shape[-1] == 1)
    return good and (asked.attn_mask is None or asked.attn_mask.stride(-1) == 1)


def _low_precision(asked: Asked, target: Target) -> bool:
    return asked.query.dtype in (_HALF if target.capability >= (8, 0) else (torch.float16,))


def _flash(asked: Asked, target: Target) -> bool:
    width = asked.query.shape[-1]
    small_shared = (8, 6) <= target.capability <= (8, 9) or target.capability >= (12, 0)
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and asked.attn_mask is None
        and width == asked.key.shape[-1] == asked.value.shape[-1]
        and width <= 256
        and target.capability >= (8, 0)
        and not (
            small_shared and asked.learns and width > 192 and not (asked.dropout_p == 0.0 and width > 224)
        )
        and not (asked.is_causal and asked.query.shape[2] != asked.key.shape[2])
        and _low_precision(asked, target)
        and _heads(asked, grouped=True)
        and _dense_last(asked, one_is_well=True)
    )


def _efficient(asked: Asked, target: Target) -> bool:
    half = asked.query.dtype in _HALF
    alignment = 4 if target.capability >= (8, 0) else 1
    if target.capability >= (8, 0) or (half and target.capability >= (7, 0)):
        alignment = max(alignment, 8 if half else 4)
    kinds = (torch.float16, torch.float32, torch.bfloat16)[: 3 if target.capability >= (8, 0) else 2]
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and asked.query.dtype in kinds
        and asked.query.shape[-1] == asked.key.shape[-1]
        and all(t.shape[-1] > 0 and t.shape[-1] % alignment == 0 for t in (asked.query, asked.value))
        and _heads(asked, grouped=False)
        and _dense_last(asked, one_is_well=False)
    )


def _cudnn(asked: Asked, target: Target) -> bool:
    limit = 256 if target.capability == (9, 0) else 128
    widths = (asked.query.shape[-1], asked.value.shape[-1])
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and _low_precision(asked, target)
        and _mask_fits(asked)
        and (asked.dropout_p * 16).is_integer()
        and all(width <= limit and width % 8 == 0 for width in widths)
        and asked.key.shape[2] > 1
        and not (asked.dropout_p > 0 and asked.query.shape[2] == 1)
        and _heads(asked, grouped=True)
        and _dense_last(asked, one_is_well=True)
    )


def _mask_fits(asked: Asked) -> bool:
    mask = asked.attn_mask
    if mask is None:
        return True
    full = (*asked.query.shape[:3], asked.key.shape[2])
    return (
        not mask.requires_grad
        and mask.dim() in (2, 4)
        and all(have in (1, want) for have, want in zip(mask.shape, full[-mask.dim() :], strict=True))
    )


def attend(asked: Asked, target: Target) -> Tensor:
    """Return the result of attention; the buffers taken are the target's."""
    backend = backend_of(asked, target)
    mask = asked.attn_mask
    if mask is not None and mask.dtype == torch.bool and backend != "math":
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=asked.query.dtype))
    asked = dataclasses.replace(asked, attn_mask=mask)
    if backend == "math":
        return _unfused(asked)
    if backend == "efficient" and mask is not None:
        asked = dataclasses.replace(asked, attn_mask=_aligned(mask, asked))
    width = asked.query.shape[-1]
    inputs = (asked.query, asked.key, asked.value)
    if backend == "flash" and width % 8:
        inputs = tuple(pad(t, (0, 8 - width % 8)) for t in inputs)
    result: Tensor = _Fused.apply(backend, asked, *inputs, asked.attn_mask, asked.learns)
    return result[..., :width] if backend == "flash" and width % 8 else result


def _unfused(asked: Asked) -> Tensor:
    result: Tensor = _aten._scaled_dot_product_attention_math(
        asked.query,
        asked.key,
        asked.value,
        asked.attn_mask,
        asked.dropout_p,
        asked.is_causal,
        None,
        scale=asked.scale,
        enable_gqa=asked.enable_gqa,
    )[0]
    return result


def _aligned(mask: Tensor, asked: Asked) -> Tensor:
    """Return the mask in the layout of the memory-efficient kernel (`preprocess_mask`, `pad_bias`).

    Rows begin at multiples of `_MASK_ALIGNMENT` elements; other masks are copied before the expansion to all
    heads. Before PyTorch 2.1.2 the multiple was 16, and the expanded mask was copied (pytorch#114173).
    """
    if any(stride % _MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]
    return mask.expand(*asked.query.shape[:3], asked.key.shape[2])


class _Fused(torch.autograd.Function):
    """A fused kernel, with the scratch buffers of the backward pass."""

    @staticmethod
    def forward(ctx: Any, backend: str, asked: Asked, *inputs: Any) -> Any:
        query, key, value, mask, learns = inputs
        kept = () if backend == "flash" else (mask, learns)
        told = _FORWARD[backend](
            query, key, value, *kept, asked.dropout_p, asked.is_causal, scale=asked.scale
        )
        out, logsumexp, *rest = told
        ctx.backend, ctx.asked = backend, (asked.dropout_p, asked.is_causal, asked.scale)
        ctx.lengths = tuple(t for t in rest if isinstance(t, int))
        seeds = [t for t in rest if isinstance(t, Tensor)][:2]
        ctx.save_for_backward(query, key, value, mask, out, logsumexp, *seeds)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, mask, out, logsumexp, *seeds = ctx.saved_tensors
        dropout, causal, scale = ctx.asked
        room = [query.new_empty(nbytes, dtype=torch.uint8) for nbytes in scratch_bytes(query, key)]
        same = (grads[0], query, key, value)
        if ctx.backend == "efficient":
            wanted = list(ctx.needs_input_grad[2:6])
            rest = (mask, out, logsumexp, *seeds, dropout, wanted, causal)
        elif ctx.backend == "cudnn":
            rest = (out, logsumexp, *seeds, mask, None, None, *ctx.lengths, dropout, causal)
        else:
            rest = (out, logsumexp, None, None, *ctx.lengths, dropout, causal, *seeds)
        made = _BACKWARD[ctx.backend](*same, *rest, scale=scale)
        del room
        bias = made[3] if ctx.needs_input_grad[5] else None
        return (None, None, *made[:3], bias, None)


_FORWARD = {
    "flash": _aten._scaled_dot_product_flash_attention,
    "cudnn": _aten._scaled_dot_product_cudnn_attention,
    "efficient": _aten._scaled_dot_product_efficient_attention,
}
_BACKWARD = {
    "flash": _aten._scaled_dot_product_flash_attention_backward,
    "cudnn": _aten._scaled_dot_product_cudnn_attention_backward,
    "efficient": _aten._scaled_dot_product_efficient_attention_backward,
}


def scratch_bytes(query: Tensor, key: Tensor) -> list[int]:
    """Return the sizes in bytes of the scratch buffers of the backward kernel of fused attention.

    For FlashAttention 2 (`flash_attn/flash_api.cpp`, `mha_bwd`): the gradient of the query in 32 bits, rows
    rounded up to 128 and columns to 32 (64 beyond 128); a row sum for each query; with grouped heads the
    gradients of keys and values for all heads. The memory-efficient kernel's (`kernel_backward.h`,
    `workspace_size`) and cuDNN's are assumed to be as large.
    """
    batch, heads, length, width = query.shape
    rows = -(-length // 128) * 128
    step = 32 if width <= 128 else 64
    columns = -(-width // step) * step
    grouped = (
        [batch * key.shape[2] * heads * width * query.element_size()] * 2 if key.shape[1] != heads else []
    )
    return [4 * batch * rows * heads * columns, 4 * batch * heads * rows, *grouped]
