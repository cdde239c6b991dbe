"""Index of the nodes of both graphs by the numbers that decisions use."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from mempool.torch.compiled.passes.insertion_points import Slots, taken_apart
from mempool.torch.compiled.passes.saved_values import Handover

if TYPE_CHECKING:
    from torch import fx

    from mempool.torch.compiled.capture import Captured
    from mempool.torch.compiled.merged_graph import Joined


class Numbered:
    """Both graphs of a step while they are being changed.

    Attributes:
        halves: the two graphs.
        graph: the numbered graph.
        value: the node of each value in the graph that makes the value; None if no node exists.
        operation: the node of each operation.
        run: the run of each node; for the node of a recomputation, the run of the recomputation.
        again: the node of the second run of an operation.
        handover: the values handed from the forward to the backward graph.
    """

    def __init__(self, joined: Joined, captured: Captured) -> None:
        self.halves, self.graph = joined.halves, captured.graph
        self.value = [None if node is None else joined.source[node] for node in captured.values]
        self.operation = [joined.source[node] for node in captured.operations]
        self.run = {node: i for i, node in enumerate(self.operation)}
        self.again: dict[int, fx.Node] = {}
        self.handover = Handover(self.halves)
        self._forward = set(self.halves.forward_nodes.values())

    def is_forward(self, node: fx.Node | None) -> bool:
        """Return true if a node was in the original forward graph."""
        return node in self._forward

    def views(self, base: int) -> list[int]:
        """Return the values that operations make in the memory of another value, the last one first."""
        found = (self.graph.base == base).nonzero()[0].tolist()
        made = [v for v in found if v != base and self.value[v] is not None and self.graph.producer[v] >= 0]
        return sorted(made, key=lambda v: -int(self.graph.producer[v]))

    def reads(self, node: fx.Node, runs: set[int]) -> bool:
        """Return true if the run of a node is in `runs`."""
        return self.run.get(node) in runs

    @cached_property
    def forward(self) -> Side:
        """Return the forward graph; to be called after all recomputations are inserted."""
        return Side(self, self.halves.forward, inside=True)

    @cached_property
    def backward(self) -> Side:
        """Return the backward graph; to be called after all recomputations are inserted."""
        return Side(self, self.halves.backward, inside=False)


class Side:
    """One of the two graphs.

    Attributes:
        graph: the graph.
        slots: the insertion points of copies.
        is_forward: true for the forward graph.
    """

    def __init__(self, step: Numbered, module: fx.GraphModule, *, inside: bool) -> None:
        self._step, self.is_forward = step, inside
        self.graph, self.slots = module.graph, Slots(module.graph)

    def find(self, value: int) -> fx.Node | None:
        """Return the node of a value in this graph, or None."""
        node = self._step.value[value]
        if node is None or self._step.is_forward(node) == self.is_forward:
            return node
        return None if self.is_forward else self._step.handover.find(node)

    def get(self, node: fx.Node) -> fx.Node:
        """Return the counterpart of a node in this graph, handed over if necessary."""
        if self.is_forward or node.graph is self.graph:
            return node
        return self._step.handover.get(node)

    def has(self, node: fx.Node) -> bool:
        """Return true if a node belongs to this graph."""
        return node.graph is self.graph


def copied(graph: fx.Graph, maker: fx.Node, source: Side | Handover) -> dict[fx.Node, fx.Node]:
    """Copy an operation and the nodes of the results to the current insertion point; map old to new nodes."""
    new = {maker: graph.node_copy(maker, source.get)}
    for one in taken_apart(maker):
        new[one] = graph.node_copy(one, lambda node: new[node])
    return new


def erase_unused(graph: fx.Graph, maker: fx.Node) -> None:
    """Erase an operation and the results without readers."""
    for one in (*reversed(taken_apart(maker)), maker):
        if not one.users:
            graph.erase_node(one)
