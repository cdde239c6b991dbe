"""Gradients that PyTorch writes in place, but not where tensors are without memory.

Some of autograd's functions make zeros and fill them. Where a mode or a subclass of tensors is at work
(`at::areAnyTensorSubclassLike`, `FunctionsManual.cpp`) they fill a copy instead, so that such a tensor is not
lost; then one buffer more is alive than in a run. Here the zeros are filled themselves, as in a run.

Likewise where gradients from two uses of a tensor meet (`InputBuffer::accumulate`, `input_buffer.cpp`): a run
adds the second to the first one, in its place, if nobody else holds it (`can_accumulate_inplace`).
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
#: Of an operation out of place: the nodes that do it on zeros of their own, and what they do in a run.
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
    """What a run would do in the backward that is at work: another operation, or the same.

    Args:
        operation: one of `IN_PLACE`.
    """
    node = torch._C._current_autograd_node()
    nodes, instead = IN_PLACE[operation]
    return instead if node is not None and node.name() in nodes else operation


#: Nodes that add no two tensors in their own gradient, so that what is added while they are at work are
#: gradients that meet. Of others nobody can tell.
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
_NEVER_ADD |= {"_FusedBackward", "_LayerBackward"}  # attention's and recurrent layers', of this folder


class Meeting:
    """Tells additions of gradients that meet, where the first one is held by nobody else."""

    def __init__(self) -> None:
        self._least = [sys.maxsize] * 3

    def in_place(self, args: Any, kwargs: Any) -> bool:
        """Whether a run would add the second to the first one in its place.

        What holds a tensor is counted, in C++ and in Python, and what holds its storage. The least that was
        ever seen are the engine and what lies between it and here, whatever modes are active.
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
    """Whether its values lie side by side, each once, in whatever order."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
