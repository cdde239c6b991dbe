"""What operations do with memory that their schemas do not tell."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from traces.recorders.torch.operations import Operation, learn

#: Whose schemas say what is written. Others' often do not: what they are given counts as written.
_DECLARED = ("aten", "prims", "prim")
#: Objects of C++ that keep what they were given and read it later, past the dispatcher: quantizers their
#: scales, nested tensors their sizes, packed weights; and what other streams and communication go on using.
_KEEPERS = (
    "per_channel",
    "_nested_tensor",
    "_nested_view_from_buffer",
    "record_stream",
    "_pack",
    "lazy_clone",
)
_KEEPING = ("c10d", "_c10d_functional", "symm_mem", "quantized", "_quantized", "rpc")


def learned(func: Any) -> Operation:
    """What an operation does; of another's than PyTorch's own, also what may be."""
    operation = learn(func)
    if operation.whole or _namespace(operation) in _DECLARED:
        return operation
    arguments = tuple(argument._replace(written=True) for argument in operation.arguments)
    return dataclasses.replace(operation, arguments=arguments, views=False)


@dataclass(frozen=True)
class Odd:
    """What is to be heeded of an operation beyond its arguments and results.

    Attributes:
        functions: Python functions are among what it is given.
        keys: where its kernel is Python: the dispatch keys of that. It may use tensors that it was not given.
        keeps: something uses what it was given, or made, after it, past the dispatcher.
        blank: it does not write what it makes.
    """

    functions: bool
    keys: Any
    keeps: bool
    blank: bool

    @property
    def only_blank(self) -> bool:
        """Whether that is all that is odd."""
        return self.blank and not (self.functions or self.keeps or self.keys is not None)


def odd(func: Any, operation: Operation, device: str) -> Odd | None:
    """What is to be heeded of an operation on a kind of device; most have nothing."""
    found = Odd(operation.whole, _python(operation, device), _keeps(func, operation), not operation.fills)
    return found if found.functions or found.keys is not None or found.keeps or found.blank else None


def _keeps(func: Any, operation: Operation) -> bool:
    schema = getattr(func, "_schema", None)
    objects = schema is not None and any(
        isinstance(value.type, torch._C.ClassType) for value in (*schema.arguments, *schema.returns)
    )
    base = operation.name.partition("::")[2]
    return objects or _namespace(operation) in _KEEPING or any(part in base for part in _KEEPERS)


def _python(operation: Operation, device: str) -> Any:
    if operation.whole or not operation.arguments:
        return None
    name = operation.name.replace("::", "/")
    for key in (device.upper(), "CompositeExplicitAutograd"):
        if f"{name}/{key}" in torch.library._impls:
            return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper()))
    return None


def is_overridden(operation: Operation) -> bool:
    """Whether it has a kernel in Python for tensors with memory, on any device."""
    name = operation.name.replace("::", "/")
    return any(one.startswith(f"{name}/") and not one.endswith("/Meta") for one in torch.library._impls)


def _namespace(operation: Operation) -> str:
    return operation.name.partition("::")[0]
