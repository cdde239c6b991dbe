"""What an operation does beside making its results: whether it may run again, and keeps its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import fx

_OVERLOAD = torch._ops.OpOverload


def writes(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory an operation writes into."""
    if not isinstance(node.target, _OVERLOAD) or not node.target._schema.is_mutable:
        return []
    written: list[fx.Node] = []
    for place, said in enumerate(node.target._schema.arguments):
        given = node.args[place] if place < len(node.args) else node.kwargs.get(said.name)
        if said.alias_info is not None and said.alias_info.is_write:
            torch.fx.map_arg(given, written.append)
    return written


def is_ordered(node: fx.Node) -> bool:
    """Whether an operation draws random numbers, communicates, or nobody can say what it does."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(target, _OVERLOAD):
        return False
    return target.namespace.startswith("_c10d") or _is_random(node, target)


def _is_random(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Attention is marked so for its dropout, which is none in most cases.
    for place, said in enumerate(target._schema.arguments):
        if said.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else node.kwargs.get(said.name, 0.0)
            return bool(given != 0.0)
    return True
