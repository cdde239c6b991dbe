"""The values of a joint graph, with sizes and shared memory."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from mempool.torch.compiled.costs import number
from mempool.torch.compiled.passes.insertion_points import is_several

if TYPE_CHECKING:
    from torch import fx


@dataclass
class Values:
    """Columns of `solvers.rewriting.Graph`, filled one value at a time in the order of the nodes.

    Attributes:
        node: the node of each value; None for a result that no node names.
        symbolic: the bytes of each value, as a symbol if they depend on sizes known only at run time.
        device: the device type of each value; "" for a number.
        results: maps a node to the values of the results; -1 where a result is no value. Nested results are
            nested lists.
    """

    node: list[fx.Node | None] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    symbolic: list[Any] = field(default_factory=list)
    producer: list[int] = field(default_factory=list)
    base: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    movable: list[bool] = field(default_factory=list)
    device: list[str] = field(default_factory=list)
    results: dict[fx.Node, list[Any]] = field(default_factory=dict)
    _owners: dict[int, int] = field(default_factory=dict)

    def given(self, node: fx.Node, held: Any) -> int:
        """Add an input; return the value."""
        self.results[node] = [self._add(node, held, -1)]
        return len(self.size) - 1

    def beside(self, size: int) -> None:
        """Add memory that belongs to no node."""
        self._add(None, None, -1)
        self.size[-1] = self.symbolic[-1] = size

    def made(self, node: fx.Node, producer: int) -> None:
        """Add the results of an operation."""
        held = node.meta.get("val")
        if is_several(held):
            self.results[node] = self._parts(held, producer)
        else:
            self.results[node] = [self._add(node, held, producer)]

    def takes(self, node: fx.Node) -> bool:
        """Return true if a node only names one of several results; the node then stands for that value."""
        if node.target is not operator.getitem:
            return False
        source, index = node.args
        if source.op != "call_function" or not is_several(source.meta.get("val")):
            return False
        value = self.results[source][index]
        self.results[node] = value if is_several(value) else [value]
        if not is_several(value) and value >= 0:
            self.node[value] = node
        return True

    def read(self, node: fx.Node) -> list[int]:
        """Return the values among a node's arguments, in order."""
        found: list[int] = []
        torch.fx.map_arg((node.args, node.kwargs), lambda one: found.extend(tree_leaves(self.results[one])))
        return [value for value in found if value >= 0]

    def _parts(self, held: Any, producer: int) -> list[Any]:
        """Add several results, which may be nested."""
        return [
            self._parts(one, producer)
            if is_several(one)
            else -1
            if one is None
            else self._add(None, one, producer)
            for one in held
        ]

    def _add(self, node: fx.Node | None, held: Any, producer: int) -> int:
        value = len(self.size)
        memory = _memory(held)
        base = self._owners.setdefault(memory[0][0], value) if memory else value
        new = sum(size for key, size in memory if self._owners.setdefault(key, value) == value)
        one = isinstance(held, torch.Tensor)
        self.node.append(node)
        self.symbolic.append(new if base == value else 0)
        self.size.append(number(self.symbolic[-1]))
        self.producer.append(producer)
        self.base.append(base)
        self.rank.append(held.dim() if one else -1)
        self.movable.append(one and producer >= 0)
        self.device.append(held.device.type if one else "")
        return value


def _memory(held: Any) -> list[tuple[int, Any]]:
    """Return (identity, bytes) of each storage of a traced value."""
    found = {}
    for one in tree_leaves(held):
        if isinstance(one, torch.Tensor):
            try:
                storage = one.untyped_storage()
                found[storage._cdata] = storage.nbytes()
            except (NotImplementedError, RuntimeError):  # such as sparse tensors, which have no storage
                found[id(one)] = one.numel() * one.element_size()
    return list(found.items())
