"""What an operation does beside making its results: whether it may run again, and keeps its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import fx

_OVERLOAD = torch._ops.OpOverload
#: Whose operators do what their schemas and tags say: an operator of somebody else may draw, count or talk.
_PYTORCHS_OWN = ("aten", "prims")


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
    """Whether an operation draws random numbers, or nobody can say what it does."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    return isinstance(target, _OVERLOAD) and (not is_pytorchs_own(node) or _is_random(node, target))


def is_pytorchs_own(node: fx.Node) -> bool:
    """Whether an operator is one of PyTorch's own, of which is known what it does when it runs once more."""
    return isinstance(node.target, _OVERLOAD) and node.target.namespace in _PYTORCHS_OWN


def _is_random(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Attention is marked so for its dropout, which is none in most cases.
    for place, said in enumerate(target._schema.arguments):
        if said.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else node.kwargs.get(said.name, 0.0)
            return bool(given != 0.0)
    return True
