"""Insertion points between the operations of a graph, where copies begin and end."""

from __future__ import annotations

import contextlib
import operator
from typing import TYPE_CHECKING, Any

from torch import fx

from mempool.torch.compiled.merged_graph import mode_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class Slots:
    """Insertion points of a graph, one after each original node; a slot keeps the insertion order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._before = {node: node.prev for node in graph.nodes}
        self._last: dict[fx.Node, fx.Node] = {}
        self._owner: dict[fx.Node, fx.Node] = {}
        self._slot: fx.Node | None = None

    @contextlib.contextmanager
    def after(self, node: fx.Node) -> Iterator[None]:
        """Insert into the slot after an operation, behind earlier insertions there."""
        parts = taken_apart(maker_of(node))
        while node.next in parts:
            node = node.next
        slot = self._owner.get(node, node)
        with self.graph.inserting_after(self._last.get(slot, node)):
            self._slot = slot
            yield
            self._slot = None

    def before(self, node: fx.Node) -> Any:
        """Insert into the slot that ends at an operation."""
        return self.after(self._before[node])

    def right_before(self, node: fx.Node) -> Any:
        """Insert directly before an operation, behind everything in the slot."""
        return self.graph.inserting_before(node)

    def begin(self) -> Any:
        """Insert before all operations."""
        placeholders = self.graph.find_nodes(op="placeholder")
        return self.after(placeholders[-1])

    def call(self, operation: Any, *args: Any) -> fx.Node:
        """Add a call of an operator, with a fake tensor as the traced result."""
        node = self.graph.call_function(operation, args)
        values, _ = fx.map_arg((node.args, node.kwargs), lambda one: one.meta.get("val"))
        fake = next(filter(None, map(mode_of, node.all_input_nodes)), None)
        if fake is not None:
            with fake:
                node.meta["val"] = operation(*values)
        if self._slot is not None:
            self._last[self._slot], self._owner[node] = node, self._slot
        return node


def is_several(held: Any) -> bool:
    """Return true for the value of a node with several results, which other nodes take apart."""
    return isinstance(held, (tuple, list))


def taken_apart(maker: fx.Node) -> list[fx.Node]:
    """Return the `getitem` nodes of an operation's results, including those of nested results."""
    if not is_several(maker.meta.get("val")):
        return []
    parts = [user for user in maker.users if user.target is operator.getitem]
    return [one for part in parts for one in (part, *taken_apart(part))]


def results_of(maker: fx.Node) -> list[fx.Node]:
    """Return the operation itself, or the `getitem` nodes if the operation has several results."""
    if not is_several(maker.meta.get("val")):
        return [maker]
    return [one for one in taken_apart(maker) if not is_several(one.meta.get("val"))]


def maker_of(result: fx.Node) -> fx.Node:
    """Return the operation that makes a result."""
    source = result.args[0] if result.target is operator.getitem else None
    if isinstance(source, fx.Node) and is_several(source.meta.get("val")):
        return maker_of(source)
    return result
