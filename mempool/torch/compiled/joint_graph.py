"""The joint graph of a step, merged from a forward and a backward graph."""

from __future__ import annotations

import operator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Metadata key of an inserted placeholder: the name of the node in the forward graph. The placeholder's own
#: name differs if a node of the backward graph already has that name.
FORWARD_NAME = "mempool_forward_name"


@dataclass(frozen=True, eq=False)
class GraphPair:
    """A forward and a backward graph as made by AOTAutograd's partitioners.

    The forward graph returns ``outputs`` results, then the saved values: tensors, then numbers. The backward
    graph's placeholder of a saved value has the name of the forward node.

    Attributes:
        forward: the forward graph.
        backward: the backward graph.
        outputs: number of results of the forward pass.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    outputs: int

    @cached_property
    def forward_nodes(self) -> Mapping[str, fx.Node]:
        """Return the nodes of the forward graph by name, without the output."""
        return {node.name: node for node in self.forward.graph.nodes if node.op != "output"}

    @property
    def saved(self) -> list[fx.Node]:
        """Return the saved values: results of the forward graph for the backward graph."""
        return list(output_of(self.forward).args[0][self.outputs :])

    @property
    def saved_placeholders(self) -> Mapping[str, fx.Node]:
        """Return the backward placeholders of saved values, by the names of the forward nodes."""
        names = {node.name for node in self.saved}
        inputs = self.backward.graph.find_nodes(op="placeholder")
        by_name = {node.meta.get(FORWARD_NAME, node.name): node for node in inputs}
        return {name: node for name, node in by_name.items() if name in names}


@dataclass(frozen=True, eq=False)
class MergedGraph:
    """The merged graph, and the original node of each of the merged nodes.

    Attributes:
        module: the merged graph.
        halves: the two original graphs.
        source: maps a merged node to the original node; for a saved value, to the forward node.
    """

    module: fx.GraphModule
    halves: GraphPair
    source: dict[fx.Node, fx.Node]

    def copy(self) -> MergedGraph:
        """Return a copy with copies of the two graphs."""
        made: dict[fx.Node, fx.Node] = {}

        def copy(module: fx.GraphModule) -> fx.GraphModule:
            graph = deepcopy(module.graph)
            made.update(zip(module.graph.nodes, graph.nodes, strict=True))
            return fx.GraphModule(module, graph)

        halves = GraphPair(copy(self.halves.forward), copy(self.halves.backward), self.halves.outputs)
        return MergedGraph(
            self.module, halves, {merged_node: made[node] for merged_node, node in self.source.items()}
        )


def output_of(module: fx.GraphModule) -> fx.Node:
    """Return the output node of a graph."""
    return next(iter(module.graph.find_nodes(op="output")))


def join(halves: GraphPair, *, stale: bool = False) -> MergedGraph:
    """Merge both graphs into one.

    Args:
        halves: the two graphs.
        stale: true if operations were inserted or changed after tracing, so that the metadata about memory
            must be computed again.
    """
    for half in (halves.forward, halves.backward):
        _add_draw_metadata(half.graph)
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    source: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node, tag: str, *, retrace: bool) -> None:
        made[node] = new = graph.node_copy(node, lambda argument: made[argument])
        new.meta = {**node.meta, "partitioner_tag": tag}
        source[new] = node
        if retrace and node.op == "call_function":
            _retrace(new)

    names, saved_placeholders = halves.forward_nodes, halves.saved_placeholders
    twice = any(node.name in names for node in halves.backward.graph.nodes if node.op == "call_function")
    for node in names.values():
        copy(node, "is_forward", retrace=stale)
    for node in halves.backward.graph.nodes:
        if node.op == "placeholder" and node.name in saved_placeholders:
            made[node] = made[names[node.name]]
        elif node.op != "output":
            copy(node, "is_backward", retrace=stale or twice)
    results = [
        *output_of(halves.forward).args[0][: halves.outputs],
        *output_of(halves.backward).args[0],
    ]
    graph.output(
        tuple(made.get(result, result) if isinstance(result, fx.Node) else result for result in results)
    )
    owner = torch.nn.Module()
    for half in (halves.forward, halves.backward):
        for name in {node.target for node in half.graph.find_nodes(op="get_attr")}:
            setattr(owner, str(name), getattr(half, str(name)))
    return MergedGraph(fx.GraphModule(owner, graph), halves, source)


#: Operators that PyTorch inserts to repeat random draws, without metadata about their results.
_DRAWS = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")


def _add_draw_metadata(graph: fx.Graph) -> None:
    """Add the metadata of inserted random operators: the result, or the state and the result."""
    for name in _DRAWS:
        target = getattr(torch._prims.rng_prims, name, None)
        for node in graph.find_nodes(op="call_function", target=target):
            fake = next(filter(None, map(fake_mode_of, node.all_input_nodes)), None)
            if fake is None or "val" in node.meta:
                continue
            place = next(
                i for i, argument in enumerate(node.args) if isinstance(argument, torch._ops.OpOverload)
            )
            operation: Any = node.args[place]
            options = {key: value for key, value in node.kwargs.items() if key != "rng_state"}
            given = node.args[place + 1 :], options
            args, kwargs = fx.map_arg(given, lambda node: node.meta.get("val"))
            with fake:
                made = operation(*args, **kwargs)
            if name == _DRAWS[0]:
                states = (user.meta["val"] for user in node.users if user.args == (node, 0))
                made = next(states, None), made
            node.meta["val"] = made


def _retrace(node: fx.Node) -> None:
    """Compute the fake tensors of an operation again from the fake tensors of the present arguments.

    A recomputed result has separate memory, which the copied metadata does not show.
    """
    fake = fake_mode_of(node)
    if fake is None:
        return
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda node: node.meta.get("val"))
    known = all(node.meta.get("val") is not None for node in node.all_input_nodes)
    with fake:
        if known and (isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem):
            node.meta["val"] = node.target(*args, **kwargs)
        else:
            node.meta["val"] = torch.utils._pytree.tree_map_only(
                torch.Tensor, torch.empty_like, node.meta["val"]
            )


def has_several_results(held: Any) -> bool:
    """Return true for the value of a node with several results, which `getitem` nodes select."""
    return isinstance(held, (tuple, list))


def fake_mode_of(node: fx.Node) -> Any:
    """Return the fake tensor mode of a node's value, or None."""
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return next((leaf.fake_mode for leaf in leaves if isinstance(leaf, torch._subclasses.FakeTensor)), None)
