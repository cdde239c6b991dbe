"""Tensors without memory, made a little faster where values alone would change."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _DisableTorchDispatch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mempool.torch.fitting.norms import ANSWERS
from mempool.torch.fitting.target.in_place import IN_PLACE, in_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: What values are taken to be, where they are no floating numbers.
_GUESS = {
    torch.bool: False,
    **dict.fromkeys((torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64), 1),
}
#: What asks for a tensor's device.
_DEVICE = torch.ops.prim.device.default
#: What reads a value.
_LOOK = torch.ops.aten._local_scalar_dense.default


class ValuelessMode(FakeTensorMode):
    """A FakeTensorMode that takes a short way for operations that only write values.

    Initialising a model, and the updates of an optimizer, are thousands of them; nothing is computed, and
    nothing is allocated, so what was given is the answer.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._guessed: Callable[[], object] | None = None

    @contextlib.contextmanager
    def guessing(self, told: Callable[[], object]) -> Iterator[None]:
        """Let values be looked at that decide nothing about memory: numbers are 1, truths are false.

        For optimizers, which look at norms to choose how far to go.

        Args:
            told: called at each look.
        """
        self._guessed = told
        try:
            yield
        finally:
            self._guessed = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and not self.in_kernel_invocation and type(args[0]) is FakeTensor:
            return args[0].fake_device  # asked for some times in each operation
        way = _WAYS.get(func)
        if way is None:
            way = _WAYS[func] = _way(func)
        if way is _FILL and _is_plain(args[0]):
            return args[0]
        if way is _UPDATE and all(map(_is_plain, args[0])):
            return None
        if way is _ANSWER and not kwargs:
            usual = super().__torch_dispatch__
            answer = ANSWERS[func](lambda operation, *given: usual(operation, types, given, {}), args)
            if answer is not None:
                return answer
        if way is _OUT_OF_PLACE:
            func = in_place(func) or func
        if func is _LOOK and type(args[0]) is FakeTensor and args[0].constant is not None:
            with _DisableTorchDispatch():
                return func(args[0].constant)  # such as an optimizer's count of steps
        if self._guessed is not None and func is _LOOK and _is_plain(args[0]):
            self._guessed()
            return _GUESS.get(args[0].dtype, 1.0)
        return super().__torch_dispatch__(func, types, args, kwargs)


def fake_mode() -> FakeTensorMode:
    """The one that is active, whose tensors may be among a job's, or a new one."""
    return detect_fake_mode() or ValuelessMode()


_USUAL, _FILL, _UPDATE, _OUT_OF_PLACE, _ANSWER = "usual", "fill", "update", "out of place", "answer"
#: Of each operation that was met: whether there is a short way.
_WAYS: dict[Any, str] = {}
#: Operations that fill a tensor of what is no tensor, and return it.
_FILLS = frozenset(
    f"aten::{name}" for name in ("uniform_", "normal_", "zero_", "fill_.Scalar", "erfinv_", "clamp_")
)


def _way(operation: Any) -> str:
    name = operation.name()
    if name in _FILLS:
        return _FILL
    if operation in IN_PLACE:
        return _OUT_OF_PLACE
    if operation in ANSWERS:
        return _ANSWER
    updates = name.startswith("aten::_foreach_") and name.partition(".")[0].endswith("_")
    return _UPDATE if updates and not operation._schema.returns else _USUAL


def _is_plain(tensor: Any) -> bool:
    """Whether nobody remembers its value."""
    return type(tensor) is FakeTensor and tensor.constant is None
