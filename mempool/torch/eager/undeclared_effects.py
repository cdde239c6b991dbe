"""Memory effects of operations that their schemas do not declare."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from mempool.recording.torch.operations import Operation, learn

#: Namespaces whose schemas declare all writes. Elsewhere they often do not: all arguments count as written.
_DECLARED = ("aten", "prims", "prim")
#: Operations whose arguments are read later, past the dispatcher: C++ objects keep them (quantizers their
#: scales, nested tensors their sizes, packed weights), or other streams and communication go on using them.
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
    """Return the traits of an operation; outside PyTorch's namespaces, all arguments count as written."""
    operation = learn(func)
    if operation.whole or _namespace(operation) in _DECLARED:
        return operation
    arguments = tuple(argument._replace(written=True) for argument in operation.arguments)
    return dataclasses.replace(operation, arguments=arguments, views=False)


@dataclass(frozen=True)
class Odd:
    """Memory effects of an operation beyond the declared arguments and results.

    Attributes:
        functions: Python functions are among the arguments.
        keys: dispatch keys of a kernel in Python, which may use tensors beyond the arguments; else None.
        keeps: arguments or results are used after the operation, past the dispatcher.
        blank: results are left unwritten.
    """

    functions: bool
    keys: Any
    keeps: bool
    blank: bool

    @property
    def only_blank(self) -> bool:
        """Return whether unwritten results are the only undeclared effect."""
        return self.blank and not (self.functions or self.keeps or self.keys is not None)


def odd(func: Any, operation: Operation, device: str) -> Odd | None:
    """Return an operation's undeclared effects on a kind of device; None for most operations."""
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
    """Return whether an operation has a Python kernel for tensors with memory, on any device."""
    name = operation.name.replace("::", "/")
    return any(one.startswith(f"{name}/") and not one.endswith("/Meta") for one in torch.library._impls)


def _namespace(operation: Operation) -> str:
    return operation.name.partition("::")[0]
