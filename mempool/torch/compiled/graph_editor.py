"""Editing of both graphs of a step: node numbers, insertion points, and saved values."""

from __future__ import annotations

import contextlib
import operator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from mempool.torch.compiled.joint_graph import FORWARD_NAME, fake_mode_of, has_several_results, output_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mempool.torch.compiled.graph import CapturedGraph
    from mempool.torch.compiled.joint_graph import GraphPair, MergedGraph


class InsertionPoints:
    """Insertion points of a graph: a slot after each original node, in which insertions keep their order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._before = {node: node.prev for node in graph.nodes}
        self._last: dict[fx.Node, fx.Node] = {}
        self._owner: dict[fx.Node, fx.Node] = {}
        self._slot: fx.Node | None = None

    @contextlib.contextmanager
    def after(self, node: fx.Node) -> Iterator[None]:
        """Insert at the end of the slot after an operation."""
        parts = getitem_nodes(producing_node(node))
        while node.next in parts:
            node = node.next
        slot = self._owner.get(node, node)
        with self.graph.inserting_after(self._last.get(slot, node)):
            self._slot = slot
            yield
            self._slot = None

    def before(self, node: fx.Node) -> Any:
        """Insert at the end of the slot before an operation."""
        return self.after(self._before[node])

    def directly_before(self, node: fx.Node) -> Any:
        """Insert directly before an operation, after all present and future insertions of the slot."""
        return self.graph.inserting_before(node)

    def begin(self) -> Any:
        """Insert before all operations."""
        placeholders = self.graph.find_nodes(op="placeholder")
        return self.after(placeholders[-1])

    def call(self, operation: Any, *args: Any) -> fx.Node:
        """Add a call of an operator, with a fake tensor as the traced result."""
        node = self.graph.call_function(operation, args)
        values, _ = fx.map_arg((node.args, node.kwargs), lambda node: node.meta.get("val"))
        fake = next(filter(None, map(fake_mode_of, node.all_input_nodes)), None)
        if fake is not None:
            with fake:
                node.meta["val"] = operation(*values)
        if self._slot is not None:
            self._last[self._slot], self._owner[node] = node, self._slot
        return node


def getitem_nodes(producer: fx.Node) -> list[fx.Node]:
    """Return the `getitem` nodes of an operation's results, including those of nested results."""
    if not has_several_results(producer.meta.get("val")):
        return []
    parts = [user for user in producer.users if user.target is operator.getitem]
    return [part for part in parts for part in (part, *getitem_nodes(part))]


def result_nodes(producer: fx.Node) -> list[fx.Node]:
    """Return the operation itself, or the `getitem` nodes if the operation has several results."""
    if not has_several_results(producer.meta.get("val")):
        return [producer]
    return [part for part in getitem_nodes(producer) if not has_several_results(part.meta.get("val"))]


def producing_node(result: fx.Node) -> fx.Node:
    """Return the operation that makes a result."""
    source = result.args[0] if result.target is operator.getitem else None
    if isinstance(source, fx.Node) and has_several_results(source.meta.get("val")):
        return producing_node(source)
    return result


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


class SavedValues:
    """The forward nodes that the backward graph receives; nodes can be added, and unused ones removed.

    AOTAutograd expects the forward graph's results as tensors, then numbers, and the backward graph's
    placeholders as numbers, then tensors.
    """

    def __init__(self, halves: GraphPair) -> None:
        self.halves = halves
        self._given = dict(halves.saved_placeholders)
        self._forward_of = {name: halves.forward_nodes[name] for name in self._given}
        self._new: list[str] = []
        placeholders = halves.backward.graph.find_nodes(op="placeholder")
        tensors = [n for n in placeholders if not (n.name in self._given and is_number(n))]
        self._first_tensor: fx.Node = tensors[0] if tensors else self.begin

    def find(self, node: fx.Node) -> fx.Node | None:
        """Return the backward node of a forward node, or None if the forward node is not saved."""
        return self._given.get(node.name)

    def get(self, node: fx.Node) -> fx.Node:
        """Return the backward node of a forward node; save the forward node if necessary."""
        if node.name in self._given:
            return self._given[node.name]
        graph = self.halves.backward.graph
        if node.op == "get_attr":
            return self._constant(node)
        with graph.inserting_before(self._first_tensor):
            new = graph.placeholder(node.name)
        if new.name != node.name:  # a backward node already has that name
            new.target = new.name
        new.meta = {**node.meta, FORWARD_NAME: node.name}
        if not is_number(node):
            self._first_tensor = new
        self._given[node.name] = new
        self._forward_of[node.name] = node
        self._new.append(node.name)
        return new

    def _constant(self, node: fx.Node) -> fx.Node:
        halves = self.halves
        if not hasattr(halves.backward, str(node.target)):
            setattr(halves.backward, str(node.target), getattr(halves.forward, str(node.target)))
        with halves.backward.graph.inserting_before(self.begin):
            new = self._given[node.name] = halves.backward.graph.get_attr(str(node.target))
        new.meta = dict(node.meta)
        return new

    @property
    def begin(self) -> fx.Node:
        """Return the first backward node after the placeholders."""
        return next(n for n in self.halves.backward.graph.nodes if n.op != "placeholder")

    def update_outputs(self) -> None:
        """Update both graphs so that exactly the used nodes are saved."""
        halves = self.halves
        gone = {name: n for name, n in self._given.items() if not n.users and _is_tensor(n)}
        before = [node for node in halves.saved if node.name not in gone]  # sizes may need the numbers
        new = [self._forward_of[name] for name in self._new if name not in gone]
        tensors = [node for node in reversed(new) if not is_number(node)]
        for node in gone.values():
            halves.backward.graph.erase_node(node)
        _set_outputs(halves, [*tensors, *before, *filter(is_number, new)])


def _is_tensor(node: fx.Node) -> bool:
    return node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)


def is_number(node: fx.Node) -> bool:
    """Return true if a node is a number known at run time."""
    return isinstance(node.meta.get("val"), _NUMBERS)


def _set_outputs(halves: GraphPair, saved: Sequence[fx.Node]) -> None:
    output = output_of(halves.forward)
    results: Any = output.args[0]
    output.args = ((*results[: halves.outputs], *saved),)
    if "desc" in output.meta:
        output.meta["desc"] = [*output.meta["desc"][: halves.outputs], *_output_descriptions(saved)]
    if "output_stack_traces" in output.meta:
        traces = output.meta["output_stack_traces"][: halves.outputs]
        output.meta["output_stack_traces"] = [*traces, *(n.meta.get("stack_trace") for n in saved)]


def _output_descriptions(saved: Sequence[fx.Node]) -> list[Any]:
    from torch._functorch._aot_autograd import descriptors

    unchecked = getattr(descriptors, "SavedForBackwardsNoVcCheckAOTOutput", None)
    checked = descriptors.SavedForBackwardsAOTOutput
    return [
        unchecked(i) if unchecked and node.meta.get("saved_tensor_with_no_vc_check") else checked(i)
        for i, node in enumerate(saved)
    ]


class NodeIndex:
    """Both graphs of a step while they are being changed.

    Attributes:
        halves: the two graphs.
        graph: the numbered graph.
        value: the node of each value, in the graph that makes it; None if no node exists.
        operation: the node of each operation.
        run: the run of each node; for the node of a recomputation, the run of the recomputation.
        recomputed_node: the node of the second run of an operation.
        saved_values: the values saved by the forward graph for the backward graph.
    """

    def __init__(self, merged: MergedGraph, captured: CapturedGraph) -> None:
        self.halves, self.graph = merged.halves, captured.graph
        self.value = [None if node is None else merged.source[node] for node in captured.values]
        self.operation = [merged.source[node] for node in captured.operations]
        self.run = {node: i for i, node in enumerate(self.operation)}
        self.recomputed_node: dict[int, fx.Node] = {}
        self.saved_values = SavedValues(self.halves)
        self._forward = set(self.halves.forward_nodes.values())

    def is_forward(self, node: fx.Node | None) -> bool:
        """Return true if a node was in the original forward graph."""
        return node in self._forward

    def views(self, base: int) -> list[int]:
        """Return the values that are views of another value, the last one first."""
        found = (self.graph.base == base).nonzero()[0].tolist()
        made = [v for v in found if v != base and self.value[v] is not None and self.graph.producer[v] >= 0]
        return sorted(made, key=lambda v: -int(self.graph.producer[v]))

    def reads(self, node: fx.Node, runs: set[int]) -> bool:
        """Return true if the run of a node is in `runs`."""
        return self.run.get(node) in runs

    @cached_property
    def forward(self) -> GraphSide:
        """Return the forward graph; valid after all recomputations are inserted."""
        return GraphSide(self, self.halves.forward, inside=True)

    @cached_property
    def backward(self) -> GraphSide:
        """Return the backward graph; valid after all recomputations are inserted."""
        return GraphSide(self, self.halves.backward, inside=False)


class GraphSide:
    """One of the two graphs.

    Attributes:
        graph: the graph.
        slots: the insertion points of copies.
        is_forward: true for the forward graph.
    """

    def __init__(self, step: NodeIndex, module: fx.GraphModule, *, inside: bool) -> None:
        self._step, self.is_forward = step, inside
        self.graph, self.slots = module.graph, InsertionPoints(module.graph)

    def find(self, value: int) -> fx.Node | None:
        """Return the node of a value in this graph, or None."""
        node = self._step.value[value]
        if node is None or self._step.is_forward(node) == self.is_forward:
            return node
        return None if self.is_forward else self._step.saved_values.find(node)

    def get(self, node: fx.Node) -> fx.Node:
        """Return the counterpart of a node in this graph; save the node if necessary."""
        if self.is_forward or node.graph is self.graph:
            return node
        return self._step.saved_values.get(node)

    def has(self, node: fx.Node) -> bool:
        """Return true if a node belongs to this graph."""
        return node.graph is self.graph


def copy_operation(
    graph: fx.Graph, producer: fx.Node, source: GraphSide | SavedValues
) -> dict[fx.Node, fx.Node]:
    """Copy an operation and the nodes of the results to the current insertion point; map old to new nodes."""
    new = {producer: graph.node_copy(producer, source.get)}
    for result in getitem_nodes(producer):
        new[result] = graph.node_copy(result, lambda node: new[node])
    return new


def erase_unused(graph: fx.Graph, producer: fx.Node) -> None:
    """Erase an operation and the results without readers."""
    for result in (*reversed(getitem_nodes(producer)), producer):
        if not result.users:
            graph.erase_node(result)
