"""Fake mode that takes buffers as a real run does, and answers reads of values on request.

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

if TYPE_CHECKING:
    from collections.abc import Callable


#: Assumed values of tensors that are not floating-point.
_GUESS = {
    torch.bool: False,
    **dict.fromkeys((torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64), 1),
}
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

    def __deepcopy__(self, memo: object) -> ValuelessMode:
        """Return this mode: the copy of a tensor, which copies all attributes, stays in the same mode."""
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and type(args[0]) is FakeTensor:
            if func is _DEVICE and not self.in_kernel_invocation:
                return args[0].fake_device  # requested several times in each operation
            answer = self._known(func, args)
            if answer is not _NOTHING:
                return answer
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return self._shrunk(result, args) if func in _SHRINKING else result

    def _known(self, func: Any, args: Any) -> Any:
        """Return a result that needs no inference, or _NOTHING."""
        constant = args[0].constant
        if func is _READ_VALUE:
            return self._read(func, args[0], constant)
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
