"""What the schema of an operation says of its arguments, asked once for each operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

#: Operations that make memory and leave it as it is.
_EMPTY = ("aten::empty", "aten::new_empty", "aten::_empty")
#: What FakeTensor and the dispatcher ask of a tensor: no bytes are touched.
_ASKS = ("prim::", "aten::sym_", "aten::is_", "aten::size", "aten::stride", "aten::numel", "aten::dim")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument that holds tensors, or may."""

    position: int  #: among the positional ones; -1: by keyword only
    name: str
    written: bool


@dataclass(frozen=True, slots=True)
class Operation:
    """What an operation does with memory, as far as its schema tells.

    Attributes:
        number: of its name, in the order in which names were met.
        asks: it is a question about a tensor, and touches nothing.
        views: whatever it returns is one of its arguments, or a view of one, and it writes nothing. It may
            change what an argument is a view of (``t_``, ``set_``, ``resize_``).
        fills: what it makes it also writes.
        arguments: those that may hold tensors.
    """

    number: int
    asks: bool = False
    views: bool = False
    fills: bool = True
    arguments: tuple[Argument, ...] = ()


def learn(function: Any, number: int) -> Operation:
    """What an operation of the dispatcher does; of one without a schema, that it reads all it is given."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        return Operation(number)
    name = function.name()
    shapes = torch.Tag.inplace_view in function.tags
    arguments, position = [], 0
    for argument in schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write and not shapes
        if "Tensor" in str(argument.type) or written:
            at = -1 if argument.kwarg_only else position
            arguments.append(Argument(at, argument.name, written))
        position += not argument.kwarg_only
    returned = [value.alias_info for value in schema.returns if "Tensor" in str(value.type)]
    aliases = bool(returned) and all(info is not None for info in returned)
    writes = any(argument.written for argument in arguments)
    return Operation(
        number,
        asks=name.startswith(_ASKS),
        views=(aliases and not writes and name != "aten::lift_fresh") or shapes,
        fills=not name.startswith(_EMPTY),
        arguments=tuple(arguments),
    )


def name_of(function: Any) -> str:
    """The operation's name in traces, such as ``aten::add.Tensor``."""
    named = getattr(function, "name", None)
    return str(named() if callable(named) else named or function)
