"""The nodes of two graphs by the numbers that decisions speak of."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from mempool.torch.rewriting.handover import Handover
from mempool.torch.rewriting.slots import Slots, taken_apart

if TYPE_CHECKING:
    from torch import fx

    from mempool.torch.rewriting.capture import Captured
    from mempool.torch.rewriting.joined import Joined


class Numbered:
    """Both graphs of a step while they are changed.

    Attributes:
        halves: they.
        graph: their numbers.
        value: the node of each value in the graph that makes it; None where no node is.
        operation: the node of each operation.
        run: of each node its run; of one that is put in for a recomputed operation, that run's.
        again: the node of the second run of an operation.
        handover: what goes from one graph to the other.
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
        """Whether a node was in the forward graph from the beginning."""
        return node in self._forward

    def views(self, base: int) -> list[int]:
        """Values that operations make, with the memory of another: the last one first."""
        found = (self.graph.base == base).nonzero()[0].tolist()
        made = [v for v in found if v != base and self.value[v] is not None and self.graph.producer[v] >= 0]
        return sorted(made, key=lambda v: -int(self.graph.producer[v]))

    def reads(self, node: fx.Node, runs: set[int]) -> bool:
        """Whether a node is one of these runs."""
        return self.run.get(node) in runs

    @cached_property
    def forward(self) -> Side:
        """The forward graph; ask when all that is recomputed is there."""
        return Side(self, self.halves.forward, inside=True)

    @cached_property
    def backward(self) -> Side:
        """The backward graph; likewise."""
        return Side(self, self.halves.backward, inside=False)


class Side:
    """One of both graphs.

    Attributes:
        graph: it.
        slots: where copies begin and end.
        is_forward: whether it is the forward one.
    """

    def __init__(self, step: Numbered, module: fx.GraphModule, *, inside: bool) -> None:
        self._step, self.is_forward = step, inside
        self.graph, self.slots = module.graph, Slots(module.graph)

    def find(self, value: int) -> fx.Node | None:
        """What stands for a value here, if anything does."""
        node = self._step.value[value]
        if node is None or self._step.is_forward(node) == self.is_forward:
            return node
        return None if self.is_forward else self._step.handover.find(node)

    def get(self, node: fx.Node) -> fx.Node:
        """What stands here for a node, handed over if need be."""
        if self.is_forward or node.graph is self.graph:
            return node
        return self._step.handover.get(node)

    def has(self, node: fx.Node) -> bool:
        """Whether a node is of this graph."""
        return node.graph is self.graph


def copied(graph: fx.Graph, maker: fx.Node, source: Side | Handover) -> dict[fx.Node, fx.Node]:
    """A run of an operation, put into a graph where it inserts now: the new node of it and of each result."""
    new = {maker: graph.node_copy(maker, source.get)}
    for one in taken_apart(maker):
        new[one] = graph.node_copy(one, lambda node: new[node])
    return new


def erase_unused(graph: fx.Graph, maker: fx.Node) -> None:
    """Take an operation and its results away where nobody reads them."""
    for one in (*reversed(taken_apart(maker)), maker):
        if not one.users:
            graph.erase_node(one)
