"""CUDA's autocast for fake tensors of the CPU.

Both devices run matrix products in the lower precision. They differ in the operations that run in 32 bits,
and so in the tensors saved for the backward pass: CUDA converts layer norm, softmax, norms and sums to 32
bits, the CPU does not. The lists are those of PyTorch 2.13: CUDA's in `ATen/autocast_mode.h`
(`AT_FORALL_FP32` and the lists below), the CPU's in `ATen/autocast_mode.cpp`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

#: Operations whose inputs are converted to 32 bits.
_WIDENED = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan softplus layer_norm
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
    upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""
#: Operations with a 32-bit result unless a type is requested, and an unconverted input.
_SUMMED = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim
"""
#: Operations whose inputs are converted to the widest type among them.
_PROMOTED = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
#: Operations that only the CPU's autocast converts.
_CPU_ONLY = (
    "cat stack index_copy cross_entropy_loss avg_pool3d adaptive_avg_pool3d max_pool3d ctc_loss.Tensor"
)

_LOWER = (torch.float16, torch.bfloat16)


def cuda_autocast_kernels() -> dict[str, Any]:
    """Return CUDA's kernels of autocast, by operator name."""
    return {
        **{name: _converting(name, _widened) for name in _WIDENED.split()},
        **{name: _converting(name, _summed) for name in _SUMMED.split()},
        **{name: _converting(name, _promoted) for name in _PROMOTED.split()},
        **dict.fromkeys(_CPU_ONLY.split(), torch.library.fallthrough_kernel),
    }


def _converting(name: str, convert: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operators = getattr(torch.ops.aten, packet)
    operator = getattr(operators, overload or "default")
    if packet == "norm":
        operator = operators  # the type selects another overload
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(below):
            args, kwargs = convert(args, kwargs)
            return operator(*args, **kwargs)

    return kernel


def _widened(args: Any, kwargs: Any) -> tuple[Any, Any]:
    return tuple(_cast(torch.float32, a) for a in args), {
        k: _cast(torch.float32, v) for k, v in kwargs.items()
    }


def _summed(args: Any, kwargs: Any) -> tuple[Any, Any]:
    requested = kwargs.get("dtype") is not None or any(isinstance(a, torch.dtype) for a in args)
    if requested or args[0].dtype not in (*_LOWER, torch.float32):
        return args, kwargs
    return args, {**kwargs, "dtype": torch.float32}


def _promoted(args: Any, kwargs: Any) -> tuple[Any, Any]:
    kinds = {a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()}
    if torch.float32 not in kinds:
        return args, kwargs
    return _widened(args, kwargs)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in _LOWER:
        return value.to(dtype)
    return value
