"""Fake mode with in-place gradients as in a real run, and reads of values on request.

Some of autograd's functions make zeros and fill them. With an active mode or a tensor subclass
(`at::areAnyTensorSubclassLike`, `FunctionsManual.cpp`) they fill a copy instead, so that the subclass is not
lost; then one buffer more is alive than in a real run. Here the zeros themselves are filled, as in a real
run. Likewise for gradients from two uses of a tensor (`InputBuffer::accumulate`, `input_buffer.cpp`): a real
run adds the second gradient to the first in place if nothing else holds the first
(`can_accumulate_inplace`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _DisableTorchDispatch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mempool.torch.estimate.fake import copies

if TYPE_CHECKING:
    from collections.abc import Callable


_aten = torch.ops.aten
#: Nodes that choose elements along a dimension (`value_selecting_reduction_backward`).
_SELECTING = frozenset(
    f"{name}Backward{number}"
    for name in ("Sort", "Topk", "Kthvalue", "Median", "Nanmedian", "Mode", "Max", "Min")
    for number in (0, 1)
)
#: For each out-of-place operation: the nodes that apply it to a tensor of their own, and the in-place form
#: of a real run.
IN_PLACE: dict[Any, tuple[frozenset[str], Any]] = {
    _aten.scatter_add.default: (
        frozenset({"GatherBackward0", "CummaxBackward0", "CumminBackward0"}),
        _aten.scatter_add_.default,
    ),
    _aten.scatter.src: (_SELECTING, _aten.scatter_.src),
    _aten.index_add.default: (frozenset({"IndexSelectBackward0"}), _aten.index_add_.default),
    _aten.index_put.default: (frozenset({"IndexBackward0"}), _aten.index_put_.default),
    _aten.put.default: (frozenset({"TakeBackward0"}), _aten.put_.default),
    _aten.masked_fill.Scalar: (  # since PyTorch 2.14
        frozenset({"MaximumBackward0", "MinimumBackward0"}),
        _aten.masked_fill_.Scalar,
    ),
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


class InPlaceAccumulation:
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
        if any(type(tensor) is not FakeTensor for tensor in args):
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


#: Assumed values of tensors that are not floating-point.
_GUESS = {
    torch.bool: False,
    **dict.fromkeys((torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64), 1),
}
#: Operation that returns a tensor's device.
_DEVICE = torch.ops.prim.device.default
#: Operation that reads a value.
_READ_VALUE = torch.ops.aten._local_scalar_dense.default
_ADD = torch.ops.aten.add.Tensor
#: Losses whose mean or sum is written into the storage of the elementwise loss, which stays alive.
_SHRINKING = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)
#: Operations applied to counts of batches and steps, which have a known value.
_COUNTS = frozenset((torch.ops.aten.add_.Tensor, torch.ops.aten.zero_.default))
_NOTHING = object()


class ValuelessMode(FakeTensorMode):
    """FakeTensorMode that takes buffers as a real run does, and answers reads of values on request.

    Attributes:
        on_read: called at each read of a value that does not affect memory, such as an optimizer's of norms:
            numbers are 1, booleans are false. None: such reads fail.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.on_read: Callable[[], object] | None = None
        self.accumulation = InPlaceAccumulation()
        self._nested = 0  # operations that are being found out

    def __deepcopy__(self, memo: object) -> ValuelessMode:
        """Return this mode: the copy of a tensor, which copies all attributes, stays in the same mode."""
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and type(args[0]) is FakeTensor:
            if func is _DEVICE and not self.in_kernel_invocation:
                return args[0].fake_device  # requested several times in each operation
            answer = self._known(func, args, kwargs)
            if answer is not _NOTHING:
                return answer
        if func in IN_PLACE:
            func = in_place(func)
        self._nested += 1
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._nested -= 1
        if func in copies.ONES_OPERATIONS:
            copies.mark_result(func, args, result)
        return self._shrunk(result, args) if func in _SHRINKING else result

    def _known(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a result that needs no inference, or _NOTHING."""
        constant = args[0].constant
        if func is _READ_VALUE:
            return self._read(func, args[0], constant)
        if func is _ADD and constant is None and not self._nested:
            return args[0] if self.accumulation.in_place(args, kwargs) else _NOTHING
        if (
            func in _COUNTS
            and constant is not None
            and all(type(value) in (int, float) for value in args[1:])
        ):
            with _DisableTorchDispatch():
                func(constant, *args[1:])
            return args[0]
        return _NOTHING

    def _read(self, func: Any, tensor: FakeTensor, constant: torch.Tensor | None) -> Any:
        """Return a known value, such as an optimizer's count of steps, or a guess if allowed."""
        if constant is not None:
            with _DisableTorchDispatch():
                return func(constant)
        if self.on_read is None:
            return _NOTHING
        self.on_read()
        return _GUESS.get(tensor.dtype, 1.0)

    def _shrunk(self, loss: Any, args: Any) -> Any:
        """Return a reduced loss in a storage with one value for each element; other losses unchanged."""
        whole = torch.broadcast_shapes(args[0].shape, args[1].shape)
        if loss.dim() or not whole:
            return loss
        with _DisableTorchDispatch():
            storage = torch.empty(whole, dtype=loss.dtype, device="meta")
            return FakeTensor(self, storage.as_strided((), ()), torch.device("cpu"))


def fake_mode() -> FakeTensorMode:
    """Return the active fake mode, whose tensors a job may use, or a new mode."""
    return detect_fake_mode() or ValuelessMode()
