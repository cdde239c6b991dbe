"""Fake mode with shortcuts for operations that change only values, and in-place gradients as in a real run.

Some of autograd's functions make zeros and fill them. With an active mode or a tensor subclass
(`at::areAnyTensorSubclassLike`, `FunctionsManual.cpp`) they fill a copy instead, so that the subclass is not
lost; then one buffer more is alive than in a real run. Here the zeros themselves are filled, as in a real
run. Likewise for gradients from two uses of a tensor (`InputBuffer::accumulate`, `input_buffer.cpp`): a real
run adds the second gradient to the first in place if nothing else holds the first
(`can_accumulate_inplace`).
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _DisableTorchDispatch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mempool.torch.estimate.fake import copies
from mempool.torch.estimate.fake.meta_results import MetaCache, MetaResult, is_cacheable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
#: Operations that turn a number's tensor into a fake tensor of the mode.
_LIFTS = frozenset((torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default))
_ADD = torch.ops.aten.add.Tensor
#: Losses whose mean or sum is written into the storage of the elementwise loss, which stays alive.
_SHRINKING = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)
#: Operations applied to counts of batches and steps.
_NUMBERS = (int, float)
_COUNTS = frozenset((torch.ops.aten.add_.Tensor, torch.ops.aten.zero_.default))


class ValuelessMode(FakeTensorMode):
    """FakeTensorMode with shortcuts for operations that only write values.

    Initialising a model and updating parameters take thousands of these; nothing is computed and nothing is
    allocated, so the argument is the result.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._on_guess: Callable[[], object] | None = None
        self._meta_cache = MetaCache(self)
        self.accumulation = InPlaceAccumulation()
        self._nested = 0  # operations that are being found out
        self.cache_enabled = False  # PyTorch's own cache, which would add a lookup and an insertion

    def __deepcopy__(self, memo: object) -> ValuelessMode:
        """Return this mode: the copy of a tensor, which copies all attributes, stays in the same mode."""
        return self

    @contextlib.contextmanager
    def guess_values(self, on_read: Callable[[], object]) -> Iterator[None]:
        """Allow reads of values that do not affect memory: numbers are 1, booleans are false.

        For optimizers, which read norms to choose the length of a step.

        Args:
            on_read: called at each read.
        """
        self._on_guess = on_read
        try:
            yield
        finally:
            self._on_guess = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and not self.in_kernel_invocation and type(args[0]) is FakeTensor:
            return args[0].fake_device  # requested several times in each operation
        shortcut = _SHORTCUTS.get(func)
        if shortcut is None:
            shortcut = _SHORTCUTS[func] = _shortcut_of(func)
        if shortcut is _SHRINK:
            return self._shrunk(self._dispatch_usual(func, types, args, kwargs), args)
        if shortcut not in _BY_KIND:
            answer = self._dispatch_shortcut(shortcut, func, args, kwargs)
            if answer is not _NOTHING:
                return answer
        if shortcut in _REMEMBERED and not self.in_kernel_invocation:
            made = self._dispatch_cached(
                in_place(func) if shortcut is _OUT_OF_PLACE else func, types, args, kwargs
            )
            if shortcut is _ONES:
                copies.mark_result(func, args, made)
            return made
        return self._dispatch_usual(func, types, args, kwargs)

    def _dispatch_usual(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return PyTorch's own result, which may decompose the operation into others that reach this mode."""
        self._nested += 1
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._nested -= 1

    def _shrunk(self, loss: Any, args: Any) -> Any:
        """Return a reduced loss in a storage with one value for each element; other losses unchanged."""
        whole = torch.broadcast_shapes(args[0].shape, args[1].shape)
        if loss.dim() or not whole:
            return loss
        storage = torch.empty(whole, dtype=loss.dtype, device="meta")
        return self._meta_cache.tensor(storage.as_strided((), ()))

    def _dispatch_shortcut(self, shortcut: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a result that does not depend on sizes, or _NOTHING."""
        if shortcut is _UPDATE:
            return None if all(map(_is_plain, args[0])) else _NOTHING
        if shortcut is _LIFT:
            return self._constant(args[0]) if _is_number(args[0]) else _NOTHING
        if type(args[0]) is not FakeTensor:
            return _NOTHING
        constant = args[0].constant
        if shortcut is _FILL and constant is None:
            return args[0]
        if shortcut is _READ:
            return self._read(func, args[0], constant)
        if shortcut is _ACCUMULATE:
            meets = constant is None and not self._nested and self.accumulation.in_place(args, kwargs)
            return args[0] if meets else _NOTHING
        if func in _COUNTS and constant is not None and all(type(value) in _NUMBERS for value in args[1:]):
            with _DisableTorchDispatch():
                func(constant, *args[1:])
            return args[0]
        return _NOTHING

    def _read(self, func: Any, tensor: FakeTensor, constant: torch.Tensor | None) -> Any:
        """Return a known value, such as an optimizer's count of steps, or a guess if allowed."""
        if constant is not None:
            with _DisableTorchDispatch():
                return func(constant)
        if self._on_guess is None:
            return _NOTHING
        self._on_guess()
        return _GUESS.get(tensor.dtype, 1.0)

    def _constant(self, number: torch.Tensor) -> FakeTensor:
        """Turn a number's tensor into a fake tensor with a known value, as FakeTensorMode does."""
        with _DisableTorchDispatch():
            value = number.clone()
            made = self._meta_cache.tensor(torch.empty_like(number, device="meta"))
        made.constant = value
        self.fake_tensor_converter.add_constant_storage_mapping(made)
        self.fake_tensor_converter.set_tensor_memo(value, made)
        return made

    def _dispatch_cached(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return the cached result, or else PyTorch's, which is then cached."""
        cache = self._meta_cache
        key = cache.key(func, args, kwargs)
        answer = None if key is None else cache.lookup(key, args, kwargs or {})
        if isinstance(answer, MetaResult):
            return cache.materialize(answer, args)
        result = self._dispatch_usual(func, types, args, kwargs)
        if key is not None and answer is False:
            cache.store(key, func, args, kwargs, result)
        return result


def fake_mode() -> FakeTensorMode:
    """Return the active fake mode, whose tensors a job may use, or a new mode."""
    return detect_fake_mode() or ValuelessMode()


_USUAL, _FILL, _UPDATE, _OUT_OF_PLACE = "usual", "fill", "update", "out of place"
_READ, _LIFT, _COUNT, _ACCUMULATE, _KNOWN, _SHRINK = "look", "lift", "count", "meet", "known", "shrink"
_ONES = "ones"
_REMEMBERED = frozenset((_KNOWN, _ONES, _COUNT, _ACCUMULATE, _OUT_OF_PLACE))
#: Shortcuts that depend only on the kinds of the arguments.
_BY_KIND = frozenset((_KNOWN, _ONES, _USUAL))
_NOTHING = object()
#: Shortcut of each operation seen so far.
_SHORTCUTS: dict[Any, str] = {}
#: Operations that fill a tensor from numbers, and return the tensor.
_FILLS = frozenset(
    f"aten::{name}" for name in ("uniform_", "normal_", "zero_", "fill_.Scalar", "erfinv_", "clamp_")
)


def _shortcut_of(operation: Any) -> str:
    name = operation.name()
    if name in _FILLS:
        return _FILL
    if operation in IN_PLACE:
        return _OUT_OF_PLACE
    if operation is _READ_VALUE:
        return _READ
    if operation in _LIFTS:
        return _LIFT
    if operation in _SHRINKING:
        return _SHRINK
    if operation in _COUNTS:
        return _COUNT
    if operation is _ADD:
        return _ACCUMULATE
    if operation in copies.ONES_OPERATIONS:
        return _ONES
    updates = name.startswith("aten::_foreach_") and name.partition(".")[0].endswith("_")
    if updates and not operation._schema.returns:
        return _UPDATE
    return _KNOWN if is_cacheable(operation) else _USUAL


def _is_plain(tensor: Any) -> bool:
    """Return whether a tensor is fake without a known value."""
    return type(tensor) is FakeTensor and tensor.constant is None


def _is_number(tensor: Any) -> bool:
    """Return whether a tensor is real and holds at most one number."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.numel() <= 1
        and not tensor.dtype.is_complex
        and not tensor.requires_grad
    )
