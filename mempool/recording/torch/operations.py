"""Memory effects of operations according to their schemas, computed once per operation."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_BY_KEYWORD = 1 << 30
#: Queries of tensors by FakeTensor and the dispatcher, without accesses of bytes.
_ASKS = ("prim::", "aten::sym_", "aten::is_", "aten::size", "aten::stride", "aten::numel", "aten::dim")

#: Arguments that kernels update without a declaration in the schema (``native_batch_norm``,
#: ``cudnn_batch_norm``, ``_cudnn_rnn``), except in operations that only read them.
UNDECLARED = frozenset(("running_mean", "running_var", "dropout_state"))
ONLY_READ = ("backward", "functional", "no_training", "no_update")
UNDECLARED_OF = frozenset((("aten::mkldnn_rnn_layer_backward", "workspace"),))
#: Losses that compute the elementwise loss in a buffer of the kernel, and its mean or sum in a result whose
#: storage has the same size (``ATen/native/Loss.cpp``), on each device.
_WITH_SCRATCH = frozenset(("aten::mse_loss", "aten::smooth_l1_loss"))


class Argument(NamedTuple):
    """An argument that has or may have tensors."""

    position: int  #: index; beyond all positional arguments if keyword-only
    name: str
    written: bool


@dataclass(frozen=True, slots=True)
class Operation:
    """The memory effects of an operation according to its schema.

    Attributes:
        name: such as ``aten::add.Tensor``.
        asks: true for a query of a tensor, without accesses.
        views: true if each result is an argument or a view of an argument, without writes. The operation may
            rebind an argument to other memory (``t_``, ``set_``, ``resize_``).
        makes: true if results may be new tensors.
        fills: true if new results are written, unlike those of ``empty``.
        arguments: arguments that may have tensors, except tensors used only for their shape, as by
            ``zeros_like``.
        whole: true without a schema: all arguments together count as one argument.
        scratch: true if the kernel of a reduced loss has a buffer of the size of the result's storage.
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
    """Return the memory effects of a dispatcher operation; without a schema, it reads all arguments."""
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
