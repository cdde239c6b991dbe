"""Memory behaviour of operations according to their schema, computed once per operation."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_BY_KEYWORD = 1 << 30
#: Queries of a tensor by FakeTensor and the dispatcher, which touch no bytes.
_ASKS = ("prim::", "aten::sym_", "aten::is_", "aten::size", "aten::stride", "aten::numel", "aten::dim")

#: Arguments that kernels update although the schema does not declare so (``native_batch_norm``,
#: ``cudnn_batch_norm``, ``_cudnn_rnn``), except in operations that only read them.
UNDECLARED = frozenset(("running_mean", "running_var", "dropout_state"))
ONLY_READ = ("backward", "functional", "no_training", "no_update")
UNDECLARED_OF = frozenset((("aten::mkldnn_rnn_layer_backward", "workspace"),))
#: Losses that compute the loss of each element in a buffer of the kernel, and then its mean or sum in the
#: result, whose storage is as large (``ATen/native/Loss.cpp``), on each device.
_WITH_SCRATCH = frozenset(("aten::mse_loss", "aten::smooth_l1_loss"))


class Argument(NamedTuple):
    """One argument that holds or may hold tensors."""

    position: int  #: among the positional arguments; beyond all of them if keyword-only
    name: str
    written: bool


@dataclass(frozen=True, slots=True)
class Operation:
    """The memory behaviour of an operation, as far as the schema shows.

    Attributes:
        name: such as ``aten::add.Tensor``.
        asks: a query of a tensor, which touches nothing.
        views: each result is an argument or a view of an argument, and nothing is written. The operation may
            rebind an argument to other memory (``t_``, ``set_``, ``resize_``).
        makes: results may be new tensors, not only arguments.
        fills: new results are also written, unlike those of ``empty``.
        arguments: arguments that may hold tensors, without those used for their shape only, as by
            ``zeros_like``.
        whole: no schema exists; all arguments together count as one argument.
        scratch: while a reduced loss is computed, the kernel holds a buffer as large as the result's storage.
    """

    name: str
    asks: bool = False
    views: bool = False
    makes: bool = True
    fills: bool = True
    arguments: tuple[Argument, ...] = (Argument(0, "", False),)  # noqa: FBT003
    whole: bool = True
    scratch: bool = False


@functools.cache
def learn(function: Any) -> Operation:
    """Return the behaviour of a dispatcher operation; one without a schema reads all arguments."""
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
        scratch=name in _WITH_SCRATCH,
    )


def _is_written(argument: Any, base: str) -> bool:
    if argument.alias_info is not None:
        return bool(argument.alias_info.is_write)
    if argument.name in UNDECLARED:
        return not any(part in base for part in ONLY_READ)
    return (base, argument.name) in UNDECLARED_OF
