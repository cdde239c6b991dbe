"""Operator traits, computed once and read each time the operation runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from mempool.torch.eager.undeclared_effects import Odd, is_overridden, learned, odd

if TYPE_CHECKING:
    from types import FrameType

    from mempool.recording.torch.operations import Argument

#: Tensor classes that wrap no other tensor; most tensors are of these.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
#: Operations whose footprint depends on more than shapes: on data, or on a storage's present size.
_SIZED_OTHERWISE = frozenset(
    ("resize", "resize_", "resize_as_", "_resize_output_", "set_", "_to_sparse", "to_sparse", "bincount")
)


def is_compiled() -> bool:
    """Return whether a function passed to `torch.compile` is running, compiled or not."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back
    return False


class Kind:
    """Traits of one dispatcher operation.

    Attributes:
        function: the operation.
        call: callable that runs the operation, without a detour through Python if possible.
        asks: see `Operation`.
        views: see `Operation`.
        whole: see `Operation`.
        arguments: see `Operation`.
        odd: undeclared memory effects, or None.
        plain: no argument is a tensor, only numbers and the like.
        may_pass: whether the operation may skip the mode while nothing moves: the argument shapes determine
            the result size, and the schema declares all memory accesses.
    """

    __slots__ = ("arguments", "asks", "call", "function", "may_pass", "odd", "plain", "views", "whole")

    def __init__(self, function: Any, device: str) -> None:
        """Compute the traits of a function on a kind of device such as ``cpu``."""
        operation = learned(function)
        self.function = function
        self.call = function._op if type(function) is torch._ops.OpOverload else function
        self.asks, self.views, self.whole = operation.asks, operation.views, operation.whole
        self.arguments: tuple[Argument, ...] = operation.arguments
        self.odd: Odd | None = odd(function, operation, device)
        keeps = self.odd is not None and self.odd.keeps
        schema = getattr(function, "_schema", None)
        tensors = schema is None or any("Tensor" in str(one.type) for one in schema.arguments)
        self.plain = not keeps and not tensors
        name = operation.name.partition("::")[2].split(".", 1)[0]
        self.may_pass = (
            (self.odd is None or self.odd.only_blank)
            and operation.name.startswith("aten::")
            and name not in _SIZED_OTHERWISE
            and torch.Tag.dynamic_output_shape not in getattr(function, "tags", ())
            and not (schema is None or any(one.is_out for one in schema.arguments))
            and not is_overridden(operation)
        )

    @property
    def writes(self) -> bool:
        """Return whether the operation may write an argument."""
        return self.whole or any(argument.written for argument in self.arguments)
