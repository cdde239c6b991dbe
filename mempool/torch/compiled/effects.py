"""Side effects of an operation: memory writes, random draws, and unknown effects of foreign operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import fx

_OVERLOAD = torch._ops.OpOverload
#: Namespaces whose operators do only as their schemas and tags say. An operator of a third party may draw
#: random numbers, count its calls or communicate.
_PYTORCHS_OWN = ("aten", "prims")


def writes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory an operation writes to."""
    if not isinstance(node.target, _OVERLOAD) or not node.target._schema.is_mutable:
        return []
    written: list[fx.Node] = []
    for place, said in enumerate(node.target._schema.arguments):
        given = node.args[place] if place < len(node.args) else node.kwargs.get(said.name)
        if said.alias_info is not None and said.alias_info.is_write:
            torch.fx.map_arg(given, written.append)
    return written


def is_ordered(node: fx.Node) -> bool:
    """Return true if an operation draws random numbers or has unknown side effects."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    return isinstance(target, _OVERLOAD) and (not is_pytorchs_own(node) or _is_random(node, target))


def is_pytorchs_own(node: fx.Node) -> bool:
    """Return true for PyTorch's own operators, whose effects when run again are known."""
    return isinstance(node.target, _OVERLOAD) and node.target.namespace in _PYTORCHS_OWN


def _is_random(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Attention carries the tag because of its dropout, which is 0 in most cases.
    for place, said in enumerate(target._schema.arguments):
        if said.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else node.kwargs.get(said.name, 0.0)
            return bool(given != 0.0)
    return True
