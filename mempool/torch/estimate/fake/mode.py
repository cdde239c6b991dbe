"""Fake mode that allocates the buffers of a real run, and can answer reads of values.

With an active mode some of PyTorch's gradients work out of place (`at::areAnyTensorSubclassLike` in
`FunctionsManual.cpp`, `InputBuffer::accumulate` in `input_buffer.cpp`): a run without memory holds one buffer
more for a moment, so that the peak is never below that of a real run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C import _DisableTorchDispatch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable


#: Operation that returns a tensor's device.
_DEVICE = torch.ops.prim.device.default
#: Operation that reads a value.
_READ_VALUE = torch.ops.aten._local_scalar_dense.default
#: Losses whose mean or sum is written into the storage of the elementwise loss, which stays alive.
_SHRINKING = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)
#: Operations applied to counts of batches and steps, which have a known value.
_COUNTS = frozenset((torch.ops.aten.add_.Tensor, torch.ops.aten.zero_.default))
#: Tests of values that are false for finite numbers; PyTorch composes `isfinite` from comparisons.
_NOT_FINITE = frozenset(
    getattr(torch.ops.aten, name).default for name in ("isnan", "isinf", "isposinf", "isneginf")
)
_NOTHING = object()


class ValuelessMode(FakeTensorMode):
    """FakeTensorMode that allocates the buffers of a real run, and can answer reads of values.

    Tests for NaN and infinity have the result of finite numbers.

    Attributes:
        on_read: function that answers reads of tensors without values; None: such reads fail.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.on_read: Callable[[FakeTensor], Any] | None = None

    def __deepcopy__(self, memo: object) -> ValuelessMode:
        """Return this mode, so that a deep copy of a tensor stays in the same mode."""
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and type(args[0]) is FakeTensor:
            if func is _DEVICE and not self.in_kernel_invocation:
                return args[0].fake_device  # requested several times per operation
            answer = self._known(func, args)
            if answer is not _NOTHING:
                return answer
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _NOT_FINITE:
            know(result, truth=False)
        return self._shrunk(result, args) if func in _SHRINKING else result

    def _known(self, func: Any, args: Any) -> Any:
        """Return a result that is known without shape inference, or _NOTHING."""
        constant = args[0].constant
        if func is _READ_VALUE:
            if constant is None:
                return _NOTHING if self.on_read is None else self.on_read(args[0])
            with _DisableTorchDispatch():
                return func(constant)
        numbers = all(type(value) in (int, float) for value in args[1:])
        if func in _COUNTS and constant is not None and numbers:
            with _DisableTorchDispatch():
                func(constant, *args[1:])
            return args[0]
        return _NOTHING

    def _shrunk(self, loss: Any, args: Any) -> Any:
        """Return a reduced loss in a storage of the elementwise loss's size.

        Return other losses unchanged.
        """
        whole = torch.broadcast_shapes(args[0].shape, args[1].shape)
        if loss.dim() or not whole:
            return loss
        with _DisableTorchDispatch():
            storage = torch.empty(whole, dtype=loss.dtype, device="meta")
            return FakeTensor(self, storage.as_strided((), ()), torch.device("cpu"))


def know(result: Any, *, truth: bool) -> None:
    """Give a fake tensor known values, which fake mode propagates to tensors computed from them alone."""
    with _disable_current_modes():
        result.constant = torch.tensor(truth).expand(result.shape)
    result.fake_mode.fake_tensor_converter.add_constant_storage_mapping(result)


def finite(tensor: torch.Tensor) -> torch.Tensor:
    """Return a mask of ones, computed with the intermediate tensors of `torch.isfinite`."""
    result = (tensor == tensor).mul(tensor.abs() != float("inf"))
    know(result, truth=True)
    return result


def fake_mode() -> FakeTensorMode:
    """Return the active fake mode, or a new mode; a job may use tensors of the active mode."""
    return detect_fake_mode() or ValuelessMode()
