"""What the schema of an operation says of its arguments, asked once for each operation."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_BY_KEYWORD = 1 << 30
#: What FakeTensor and the dispatcher ask of a tensor: no bytes are touched.
_ASKS = ("prim::", "aten::sym_", "aten::is_", "aten::size", "aten::stride", "aten::numel", "aten::dim")

#: What kernels update although the schema does not say so (``native_batch_norm``, ``cudnn_batch_norm``,
#: ``_cudnn_rnn``), except in those that only read it.
_UNSAID = frozenset(("running_mean", "running_var", "dropout_state"))
_ONLY_READ = ("backward", "functional", "no_training", "no_update")
_UNSAID_OF = frozenset((("aten::mkldnn_rnn_layer_backward", "workspace"),))


class Argument(NamedTuple):
    """One argument that holds tensors, or may."""

    position: int  #: among the positional ones; beyond them all if it is given by keyword only
    name: str
    written: bool


@dataclass(frozen=True, slots=True)
class Operation:
    """What an operation does with memory, as far as its schema tells.

    Attributes:
        name: such as ``aten::add.Tensor``.
        asks: it is a question about a tensor, and touches nothing.
        views: whatever it returns is one of its arguments, or a view of one, and it writes nothing. It may
            change what an argument is a view of (``t_``, ``set_``, ``resize_``).
        makes: it may return new tensors, not only what it was given.
        fills: what it makes it also writes, unlike ``empty``.
        arguments: those that may hold tensors. What is asked for its shape only, as by
            ``zeros_like``, is not among them.
        whole: it has no schema; all it is given together is its one argument.
    """

    name: str
    asks: bool = False
    views: bool = False
    makes: bool = True
    fills: bool = True
    arguments: tuple[Argument, ...] = (Argument(0, "", False),)  # noqa: FBT003
    whole: bool = True


@functools.cache
def learn(function: Any) -> Operation:
    """What an operation of the dispatcher does; one without a schema reads all it is given."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        named = getattr(function, "name", None)
        return Operation(str(named() if callable(named) else named or function))
    name, shapes = function.name(), torch.Tag.inplace_view in function.tags
    base = name.partition(".")[0]
    arguments = [
        Argument(
            _BY_KEYWORD if argument.kwarg_only else at,
            argument.name,
            _is_written(argument, base) and not shapes,
        )
        for at, argument in enumerate(schema.arguments)
        if "Tensor" in str(argument.type)
    ]
    aliases = [value.alias_info is not None for value in schema.returns if "Tensor" in str(value.type)]
    writes = any(argument.written for argument in arguments)
    return Operation(
        name,
        asks=name.startswith(_ASKS),
        views=shapes or (bool(aliases) and all(aliases) and not writes),
        makes=not all(aliases),
        fills="empty" not in base,
        whole=False,
        arguments=() if base.endswith("_like") or base.startswith("aten::new_") else tuple(arguments),
    )


def _is_written(argument: Any, base: str) -> bool:
    if argument.alias_info is not None:
        return bool(argument.alias_info.is_write)
    if argument.name in _UNSAID:
        return not any(part in base for part in _ONLY_READ)
    return (base, argument.name) in _UNSAID_OF
