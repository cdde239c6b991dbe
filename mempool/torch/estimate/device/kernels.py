"""Dispatcher overrides for functions that CUDA computes differently than the CPU, for fake tensors.

PyTorch composes these functions from others, depending on the device. Here each has a kernel at the
dispatcher's key for autograd on the CPU, so that all callers are served, including C++ and
`torch.nn.functional`. Real tensors go the usual way.

Attention: on the CPU PyTorch takes another fused kernel, or the unfused one, which keeps the scores: the
peaks of the two differ by tens of percent. The choice of backend follows PyTorch 2.13,
`ATen/native/transformers/cuda/sdp_utils.cpp` (`select_sdp_backend` and its checks) and `sdp_utils_cpp.h`; the
treatment of masks and odd widths before the kernel follows `ATen/native/transformers/attention.cpp`.

Recurrent layers: the CPU steps through time and keeps each step's gates; cuDNN makes the output, the last
states and one reserve, kept for the backward pass, whose content is not documented; see `reserve_bytes`.
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
from torch.nn.functional import linear, pad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


#: Kept values per step, in multiples of the hidden size: the gates, and the cell's or hidden state.
KEPT = {"lstm": 6, "gru": 5, "rnn_tanh": 2, "rnn_relu": 2}


def recurrent_layer(kind: str, *args: Any) -> tuple[Tensor, ...]:
    """Return the result of `torch.lstm` and similar functions; ``args`` as theirs, packed sequences too.

    Returns:
        The output and the last states: hidden, and for an LSTM the cell's.
    """
    packed = isinstance(args[3], (list, tuple))
    inputs = args[0]
    states, weights, _, layers, dropout, train, bidirectional, *_rest = args[2 if packed else 1 :]
    states = tuple(states) if isinstance(states, (list, tuple)) else (states,)
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        inputs, *states = (t.to(low) for t in (inputs, *states))
        weights = [w.to(low) for w in weights]
    cells = inputs.shape[:-1].numel() * layers * (2 if bidirectional else 1)
    reserve = 0
    if train and torch.is_grad_enabled():
        reserve = reserve_bytes(kind, cells, states[-1].shape[-1], inputs.dtype.itemsize)
        reserve += cells // layers * (layers - 1) * states[-1].shape[-1] if dropout > 0 else 0
    shape = (*inputs.shape[:-1], states[0].shape[-1] * (2 if bidirectional else 1))
    made: tuple[Tensor, ...] = _Layer.apply(shape, reserve, len(states), inputs, *states, *weights)
    return made


def reserve_bytes(kind: str, cells: int, width: int, itemsize: int) -> int:
    """Estimate the reserve that `cudnnGetRNNTempSpaceSizes` returns for training, without dropout, in bytes.

    Args:
        kind: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        cells: elements of the batch times steps of time times layers times directions.
        width: of the hidden state.
        itemsize: bytes of one value.
    """
    return KEPT[kind] * cells * width * itemsize


class _Layer(torch.autograd.Function):
    """One call of cuDNN's recurrent layers."""

    @staticmethod
    def forward(
        ctx: Any, shape: tuple[int, ...], reserve: int, states: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inputs = tensors[0]
        made = (inputs.new_empty(shape), *(t.new_empty(t.shape) for t in tensors[1 : 1 + states]))
        kept = inputs.new_empty(reserve, dtype=torch.uint8)
        ctx.save_for_backward(*tensors, made[0], kept)
        return made

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors[:-2]
        wanted = zip(tensors, ctx.needs_input_grad[3:], strict=True)
        return (None, None, None, *(torch.empty_like(t) if need else None for t, need in wanted))


_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
#: Elements; rows of a mask must begin at multiples of this number: `mem_eff_alignment` of `attention.cpp`.
_MASK_ALIGNMENT = 8


@dataclasses.dataclass(frozen=True)
class Target:
    """A model of GPU, as far as the choice of kernels depends on the model.

    Attributes:
        capability: the compute capability: (8, 0) is an A100, (8, 9) an RTX 4090 or L4, (9, 0) an H100.
        cudnn: cuDNN's version, as returned by `torch.backends.cudnn.version()`.
    """

    capability: tuple[int, int] = (8, 0)
    cudnn: int = 91600

    @property
    def prefers_cudnn_attention(self) -> bool:
        """Return whether cuDNN's attention comes first (`check_prefer_cudnn_attention`)."""
        return self.cudnn > 91500 and self.capability[0] in (9, 10)


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

    @property
    def learns(self) -> bool:
        """Return whether a backward pass may follow."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def backend_of(call: AttentionCall, target: Target) -> str:
    """Return the backend that the target would take: "cudnn", "flash", "efficient" or "math".

    The user's switches count (`torch.nn.sdpa_kernel`, `torch.backends.cuda.enable_*_sdp`).
    """
    order = [("flash", _flash), ("efficient", _efficient)]
    if target.prefers_cudnn_attention:
        order.insert(0, ("cudnn", _cudnn))
    if not _is_dense(call):
        return "math"
    return next((name for name, can in order if can(call, target)), "math")


def _is_dense(call: AttentionCall) -> bool:
    """Return whether types and shapes suit all fused kernels."""
    q, k, v = call.query, call.key, call.value
    if not q.dim() == k.dim() == v.dim() == 4 or not q.dtype == k.dtype == v.dtype:
        return False
    return bool(q.shape[0] == k.shape[0] == v.shape[0] and q.shape[2] > 0 and k.shape[2] > 0)


def _heads_match(call: AttentionCall, *, grouped: bool) -> bool:
    q, k, v = (t.shape[1] for t in (call.query, call.key, call.value))
    if call.enable_gqa and grouped:
        return bool(k == v and q % k == 0)
    return bool(q == k == v)


def _dense_last(call: AttentionCall, *, one_is_well: bool) -> bool:
    """Return whether the last stride is 1, for the mask too."""
    inputs = (call.query, call.key, call.value)
    good = all(t.stride(-1) == 1 for t in inputs) or (one_is_well and call.query.shape[-1] == 1)
    return good and (call.attn_mask is None or call.attn_mask.stride(-1) == 1)


def _low_precision(call: AttentionCall, target: Target) -> bool:
    return call.query.dtype in (_HALF if target.capability >= (8, 0) else (torch.float16,))


def _flash(call: AttentionCall, target: Target) -> bool:
    width = call.query.shape[-1]
    small_shared = (8, 6) <= target.capability <= (8, 9) or target.capability >= (12, 0)
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and call.attn_mask is None
        and width == call.key.shape[-1] == call.value.shape[-1]
        and width <= 256
        and target.capability >= (8, 0)
        and not (small_shared and call.learns and width > 192 and not (call.dropout_p == 0.0 and width > 224))
        and not (call.is_causal and call.query.shape[2] != call.key.shape[2])
        and _low_precision(call, target)
        and _heads_match(call, grouped=True)
        and _dense_last(call, one_is_well=True)
    )


def _efficient(call: AttentionCall, target: Target) -> bool:
    half = call.query.dtype in _HALF
    alignment = 4 if target.capability >= (8, 0) else 1
    if target.capability >= (8, 0) or (half and target.capability >= (7, 0)):
        alignment = max(alignment, 8 if half else 4)
    kinds = (torch.float16, torch.float32, torch.bfloat16)[: 3 if target.capability >= (8, 0) else 2]
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and call.query.dtype in kinds
        and call.query.shape[-1] == call.key.shape[-1]
        and all(t.shape[-1] > 0 and t.shape[-1] % alignment == 0 for t in (call.query, call.value))
        and _heads_match(call, grouped=False)
        and _dense_last(call, one_is_well=False)
    )


def _cudnn(call: AttentionCall, target: Target) -> bool:
    limit = 256 if target.capability == (9, 0) else 128
    widths = (call.query.shape[-1], call.value.shape[-1])
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and _low_precision(call, target)
        and _mask_fits(call)
        and (call.dropout_p * 16).is_integer()
        and all(width <= limit and width % 8 == 0 for width in widths)
        and call.key.shape[2] > 1
        and not (call.dropout_p > 0 and call.query.shape[2] == 1)
        and _heads_match(call, grouped=True)
        and _dense_last(call, one_is_well=True)
    )


def _mask_fits(call: AttentionCall) -> bool:
    mask = call.attn_mask
    if mask is None:
        return True
    full = (*call.query.shape[:3], call.key.shape[2])
    return (
        not mask.requires_grad
        and mask.dim() in (2, 4)
        and all(have in (1, want) for have, want in zip(mask.shape, full[-mask.dim() :], strict=True))
    )


def attention(call: AttentionCall, target: Target) -> Tensor:
    """Return the result of attention; the buffers taken are the target's."""
    backend = backend_of(call, target)
    mask = call.attn_mask
    if mask is not None and mask.dtype == torch.bool and backend != "math":
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=call.query.dtype))
    call = dataclasses.replace(call, attn_mask=mask)
    if backend == "math":
        return _unfused(call)
    if backend == "efficient" and mask is not None:
        call = dataclasses.replace(call, attn_mask=_aligned(mask, call))
    width = call.query.shape[-1]
    inputs = (call.query, call.key, call.value)
    if backend == "flash" and width % 8:
        inputs = tuple(pad(t, (0, 8 - width % 8)) for t in inputs)
    result: Tensor = _Fused.apply(backend, call, *inputs, call.attn_mask, call.learns)
    return result[..., :width] if backend == "flash" and width % 8 else result


def _unfused(call: AttentionCall) -> Tensor:
    result: Tensor = _aten._scaled_dot_product_attention_math(
        call.query,
        call.key,
        call.value,
        call.attn_mask,
        call.dropout_p,
        call.is_causal,
        None,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )[0]
    return result


def _aligned(mask: Tensor, call: AttentionCall) -> Tensor:
    """Return the mask in the layout of the memory-efficient kernel (`preprocess_mask`, `pad_bias`).

    Rows begin at multiples of `_MASK_ALIGNMENT` elements; other masks are copied before the expansion to all
    heads. Before PyTorch 2.1.2 the multiple was 16, and the expanded mask was copied (pytorch#114173).
    """
    if any(stride % _MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]
    return mask.expand(*call.query.shape[:3], call.key.shape[2])


class _Fused(torch.autograd.Function):
    """A fused kernel, with the scratch buffers of the backward pass."""

    @staticmethod
    def forward(ctx: Any, backend: str, call: AttentionCall, *inputs: Any) -> Any:
        query, key, value, mask, learns = inputs
        kept = () if backend == "flash" else (mask, learns)
        results = _FORWARD[backend](
            query, key, value, *kept, call.dropout_p, call.is_causal, scale=call.scale
        )
        out, logsumexp, *remaining = results
        ctx.backend, ctx.call = backend, (call.dropout_p, call.is_causal, call.scale)
        ctx.lengths = tuple(t for t in remaining if isinstance(t, int))
        seeds = [t for t in remaining if isinstance(t, Tensor)][:2]
        ctx.save_for_backward(query, key, value, mask, out, logsumexp, *seeds)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, mask, out, logsumexp, *seeds = ctx.saved_tensors
        dropout, causal, scale = ctx.call
        room = [query.new_empty(nbytes, dtype=torch.uint8) for nbytes in scratch_bytes(query, key)]
        same = (grads[0], query, key, value)
        if ctx.backend == "efficient":
            wanted = list(ctx.needs_input_grad[2:6])
            remaining = (mask, out, logsumexp, *seeds, dropout, wanted, causal)
        elif ctx.backend == "cudnn":
            remaining = (out, logsumexp, *seeds, mask, None, None, *ctx.lengths, dropout, causal)
        else:
            remaining = (out, logsumexp, None, None, *ctx.lengths, dropout, causal, *seeds)
        made = _BACKWARD[ctx.backend](*same, *remaining, scale=scale)
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


@contextlib.contextmanager
def override_kernels(key: str, kernels: Mapping[str, Any]) -> Iterator[None]:
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


def cuda_kernels(target: Target) -> dict[str, Callable[..., Any]]:
    """Return the kernels of a target, by operator name."""
    overrides: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": lambda *args, **kwargs: _attention_kernel(target, *args, **kwargs),
        "dropout": _dropout,
        "softmax.int": lambda *args, **kwargs: _softmax(_aten._softmax, *args, **kwargs),
        "log_softmax.int": lambda *args, **kwargs: _softmax(_aten._log_softmax, *args, **kwargs),
        "lstm_cell": _lstm_cell,
        **{f"{kind}.{form}": _recurrent(kind) for kind in KEPT for form in ("input", "data")},
    }
    return {name: _for_fake_tensors(name, kernel) for name, kernel in overrides.items()}


def _for_fake_tensors(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel: use PyTorch's own for real tensors, and if the kernel returns NotImplemented."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(_aten, packet), overload or "default")
    usual = torch._C.DispatchKey.CompositeImplicitAutograd  # the C++ form, not a decomposition in Python

    def chosen(*args: Any, **kwargs: Any) -> Any:
        made = kernel(*args, **kwargs) if isinstance(args[0], FakeTensor) else NotImplemented
        return operator._op_dk(usual, *args, **kwargs) if made is NotImplemented else made

    return chosen


def _attention_kernel(target: Target, *args: Any, **kwargs: Any) -> Any:
    call = AttentionCall(*args, **kwargs)
    return NotImplemented if call.query.is_nested else attention(call, target)


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
    remaining = [t if t is None else t.to(products[0].dtype) for t in (states[1], *biases)]
    hidden, cell, _ = _aten._thnn_fused_lstm_cell(*products, *remaining)
    return hidden, cell


def _recurrent(kind: str) -> Callable[..., Any]:
    return lambda *args: recurrent_layer(kind, *args)
