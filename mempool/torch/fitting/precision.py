"""Autocast as CUDA has it, for fake tensors of the CPU.

Both devices run matrix products in the lower precision; what they run in 32 bits differs, and with it what
is saved for the backward pass: CUDA widens layer norm, softmax, norms and sums, the CPU does not. The list is
that of PyTorch 2.13 (`ATen/autocast_mode.h`, `AT_FORALL_FP32` and `AT_FORALL_FP32_SET_OPT_DTYPE`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.torch.fitting.attention import Asked

#: Inputs are converted to 32 bits.
_WIDENED = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ "
    "__rpow__ softplus layer_norm native_layer_norm rms_norm group_norm cosine_similarity "
    "poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss "
    "smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss "
    "triplet_margin_loss multi_margin_loss dist pdist cdist renorm binary_cross_entropy_with_logits "
    "logsumexp interpolate upsample cross_entropy "
)
#: The result is of 32 bits where no type is asked for; the kernel reads the input as it is.
_SUMMED = "prod softmax log_softmax cumprod cumsum sum norm"


def _functions(names: str) -> frozenset[Any]:
    places = (torch, Tensor, torch.nn.functional, torch.linalg)
    return frozenset(
        getattr(place, name) for place in places for name in names.split() if hasattr(place, name)
    )


_SUMS = _functions(_SUMMED) | {torch.linalg.vector_norm, torch.linalg.matrix_norm}
#: What CUDA's autocast runs in 32 bits, as Python's callers name it.
IN_32_BITS = _functions(_WIDENED) | _SUMS


def widened(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which CUDA's autocast would call it."""
    if func in _SUMS:
        low = isinstance(args[0], Tensor) and args[0].dtype in (torch.float16, torch.bfloat16)
        asks = kwargs.get("dtype") is not None or any(isinstance(a, torch.dtype) for a in args)
        return args, kwargs if asks or not low else {**kwargs, "dtype": torch.float32}
    return (
        tuple(_as(torch.float32, a) for a in args),
        {name: _as(torch.float32, a) for name, a in kwargs.items()},
    )


def narrowed(asked: Asked) -> Asked:
    """Attention's arguments in autocast's type: all of them, the mask too if it is added."""
    kind = torch.get_autocast_dtype("cpu")
    tensors = {name: _as(kind, getattr(asked, name)) for name in ("query", "key", "value", "attn_mask")}
    return dataclasses.replace(asked, **tensors)


def _as(kind: torch.dtype, value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype not in (kind, torch.float64):
        return value.to(kind)
    return value


@contextlib.contextmanager
def autocast_of_cuda() -> Iterator[None]:
    """Let `torch.autocast("cuda")` be the autocast of fake tensors.

    Without a GPU it would switch itself off, with a warning, and the run would be in full precision.
    """
    before = torch.amp.autocast_mode.autocast.__init__

    @functools.wraps(before)
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        before(self, device_type, dtype, *args, **kwargs)

    torch.amp.autocast_mode.autocast.__init__ = init
    try:
        yield
    finally:
        torch.amp.autocast_mode.autocast.__init__ = before
