"""Gradient operations of autograd, done in place as in a real run, that fake tensors do out of place.

Some of autograd's functions make zeros and fill them. With an active mode or a tensor subclass
(`at::areAnyTensorSubclassLike`, `FunctionsManual.cpp`) they fill a copy instead, so that the subclass is not
lost; then one buffer more is alive than in a real run. Here the zeros themselves are filled, as in a real
run.

Likewise for gradients from two uses of a tensor (`InputBuffer::accumulate`, `input_buffer.cpp`): a real run
adds the second gradient to the first in place if nothing else holds the first (`can_accumulate_inplace`).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten
#: Nodes that choose elements along a dimension (`value_selecting_reduction_backward`).
_SELECTING = frozenset(
    f"{name}Backward{number}"
    for name in ("Sort", "Topk", "Kthvalue", "Median", "Nanmedian", "Mode", "Max", "Min")
    for number in (0, 1)
)
#: For each out-of-place operation: the nodes that apply it to zeros of their own, and the in-place form of a
#: real run.
IN_PLACE: dict[Any, tuple[frozenset[str], Any]] = {
    _aten.scatter_add.default: (
        frozenset({"GatherBackward0", "CummaxBackward0", "CumminBackward0"}),
        _aten.scatter_add_.default,
    ),
    _aten.scatter.src: (_SELECTING, _aten.scatter_.src),
    _aten.index_add.default: (frozenset({"IndexSelectBackward0"}), _aten.index_add_.default),
    _aten.index_put.default: (frozenset({"IndexBackward0"}), _aten.index_put_.default),
    _aten.put.default: (frozenset({"TakeBackward0"}), _aten.put_.default),
    _aten.index_fill.int_Scalar: (frozenset({"TraceBackward0"}), _aten.index_fill_.int_Scalar),
    _aten.index_fill.int_Tensor: (frozenset({"TraceBackward0"}), _aten.index_fill_.int_Tensor),
}


def in_place(operation: Any) -> Any:
    """Return the form of an operation that a real run uses in the current backward node.

    Args:
        operation: a key of `IN_PLACE`.
    """
    node = torch._C._current_autograd_node()
    nodes, instead = IN_PLACE[operation]
    return instead if node is not None and node.name() in nodes else operation


#: Nodes that add no two tensors in their own gradient, so that any addition while they run accumulates
#: gradients. For other nodes this cannot be known.
_SIMPLE = """
    " Abs AdaptiveAvgPool2D Add Addmm Alias AsStrided AvgPool2D Baddbmm Bmm Cat Clamp Clone
    Convolution Cos Div Embedding Exp Expand Gather Gelu Index IndexSelect Log LogSoftmax MaskedFill
    MaxPool2DWithIndices Mean Mm Mul NativeBatchNorm NativeDropout NativeGroupNorm NativeLayerNorm
    Neg NllLoss NllLoss2D Permute Pow Relu ReshapeAlias Rsqrt ScaledDotProductEfficientAttention
    ScaledDotProductFlashAttentionForCpu ScatterAdd Select Sigmoid Silu Sin Slice Softmax Split
    SplitWithSizes Sqrt Squeeze Stack Sub Sum T Tanh ToCopy Transpose Unbind UnsafeSplit UnsafeView
    Unsqueeze UpsampleBilinear2D UpsampleNearest2D View Where
"""
_NEVER_ADD = frozenset(f"{name}Backward{number}" for name in _SIMPLE.split() for number in range(5))
_NEVER_ADD |= {"_FusedBackward", "_LayerBackward"}  # of attention and recurrent layers, in this folder


class Meeting:
    """Detector of gradient accumulations whose first operand has no other holder."""

    def __init__(self) -> None:
        self._least = [sys.maxsize] * 3

    def in_place(self, args: Any, kwargs: Any) -> bool:
        """Return whether a real run would add the second gradient to the first in place.

        Counts the references to a tensor in C++, in Python, and to its storage. The lowest counts ever seen
        belong to a tensor held only by the engine and the frames between the engine and this call, whatever
        modes are active.
        """
        if kwargs or torch.is_grad_enabled() or len(args) != 2:
            return False
        node = torch._C._current_autograd_node()
        if node is None or node.name() not in _NEVER_ADD:
            return False
        if any(type(one) is not FakeTensor for one in args):
            return False
        held, other = (_holders(args, at) for at in (0, 1))
        self._least = [min(each) for each in zip(self._least, held, other, strict=True)]
        first, second = args
        return (
            held == self._least
            and first.shape == second.shape
            and first.dtype is second.dtype
            and _is_dense(first)
        )


def _holders(args: Any, at: int) -> list[int]:
    storage = torch._C._storage_Use_Count(args[at].untyped_storage()._cdata)
    return [args[at]._use_count(), sys.getrefcount(args[at]), storage]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values are contiguous in some order of dimensions, without overlap."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
