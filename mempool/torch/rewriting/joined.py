"""The two graphs of a step, forward and backward, as one: what a compiler is going to run, in order."""

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


#: Of a placeholder that we put in, in its meta data: the name of the node that it is in the forward graph.
#: Its own may be another, since something that is made in the backward graph has that.
FORWARD_NAME = "mempool_forward_name"


@dataclass(frozen=True, eq=False)
class Halves:
    """A forward and a backward graph as AOTAutograd's partitioners make them.

    The forward graph returns ``outputs`` results, then what the backward graph gets under the same names:
    tensors, then numbers. A node of the backward graph that is not made there has the forward node's name.

    Attributes:
        forward: the first.
        backward: the second.
        outputs: how many results the forward pass has.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    outputs: int

    @cached_property
    def forward_nodes(self) -> Mapping[str, fx.Node]:
        """By their names, without the output."""
        return {node.name: node for node in self.forward.graph.nodes if node.op != "output"}

    @property
    def saved(self) -> list[fx.Node]:
        """What the forward graph returns for the backward graph."""
        return list(output_of(self.forward).args[0][self.outputs :])

    @property
    def handed(self) -> Mapping[str, fx.Node]:
        """Placeholders of the backward graph that are nodes of the forward graph, by their names there."""
        names = {node.name for node in self.saved}
        inputs = self.backward.graph.find_nodes(op="placeholder")
        by_name = {node.meta.get(FORWARD_NAME, node.name): node for node in inputs}
        return {name: node for name, node in by_name.items() if name in names}


@dataclass(frozen=True, eq=False)
class Joined:
    """Both graphs in one, and which node of them each of its nodes stands for.

    Attributes:
        module: the one.
        halves: the two.
        source: of each node of the one, the node of the two; of what was handed over, the forward one's.
    """

    module: fx.GraphModule
    halves: Halves
    source: dict[fx.Node, fx.Node]

    def copied(self) -> Joined:
        """The same with two graphs of its own."""
        made: dict[fx.Node, fx.Node] = {}

        def copy(module: fx.GraphModule) -> fx.GraphModule:
            graph = deepcopy(module.graph)
            made.update(zip(module.graph.nodes, graph.nodes, strict=True))
            return fx.GraphModule(module, graph)

        halves = Halves(copy(self.halves.forward), copy(self.halves.backward), self.halves.outputs)
        return Joined(self.module, halves, {one: made[node] for one, node in self.source.items()})


def output_of(module: fx.GraphModule) -> fx.Node:
    """A graph's last node."""
    return next(iter(module.graph.find_nodes(op="output")))


def join(halves: Halves, *, stale: bool = False) -> Joined:
    """Both graphs in one.

    Args:
        halves: they.
        stale: whether operations were put in or changed after they were traced, so that what their nodes say
            of memory must be found anew.
    """
    for half in (halves.forward, halves.backward):
        _say(half.graph)
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    source: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node, tag: str, *, anew: bool) -> None:
        made[node] = new = graph.node_copy(node, lambda one: made[one])
        new.meta = {**node.meta, "partitioner_tag": tag}
        source[new] = node
        if anew and node.op == "call_function":
            _again(new)

    names, handed = halves.forward_nodes, halves.handed
    twice = any(node.name in names for node in halves.backward.graph.nodes if node.op == "call_function")
    for node in names.values():
        copy(node, "is_forward", anew=stale)
    for node in halves.backward.graph.nodes:
        if node.op == "placeholder" and node.name in handed:
            made[node] = made[names[node.name]]
        elif node.op != "output":
            copy(node, "is_backward", anew=stale or twice)
    results = [
        *output_of(halves.forward).args[0][: halves.outputs],
        *output_of(halves.backward).args[0],
    ]
    graph.output(tuple(made.get(one, one) if isinstance(one, fx.Node) else one for one in results))
    owner = torch.nn.Module()
    for half in (halves.forward, halves.backward):
        for name in {node.target for node in half.graph.find_nodes(op="get_attr")}:
            setattr(owner, str(name), getattr(half, str(name)))
    return Joined(fx.GraphModule(owner, graph), halves, source)


#: Which PyTorch puts in to draw the same numbers again, without saying what they make.
_DRAWS = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")


def _say(graph: fx.Graph) -> None:
    """What operations make that PyTorch has put in, and what they make where they also tell the state."""
    for name in _DRAWS:
        target = getattr(torch._prims.rng_prims, name, None)
        for node in graph.find_nodes(op="call_function", target=target):
            fake = next(filter(None, map(mode_of, node.all_input_nodes)), None)
            if fake is None or "val" in node.meta:
                continue
            place = next(i for i, one in enumerate(node.args) if isinstance(one, torch._ops.OpOverload))
            operation: Any = node.args[place]
            options = {key: one for key, one in node.kwargs.items() if key != "rng_state"}
            given = node.args[place + 1 :], options
            args, kwargs = fx.map_arg(given, lambda one: one.meta.get("val"))
            with fake:
                made = operation(*args, **kwargs)
            if name == _DRAWS[0]:
                states = (one.meta["val"] for one in node.users if one.args == (node, 0))
                made = next(states, None), made
            node.meta["val"] = made


def _again(node: fx.Node) -> None:
    """Tensors without memory of what an operation makes now, of what it is given now.

    What a compiler makes a second time has memory of its own, of which its node knows nothing.
    """
    fake = mode_of(node)
    if fake is None:
        return
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta.get("val"))
    known = all(one.meta.get("val") is not None for one in node.all_input_nodes)
    with fake:
        if known and (isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem):
            node.meta["val"] = node.target(*args, **kwargs)
        else:
            node.meta["val"] = torch.utils._pytree.tree_map_only(
                torch.Tensor, torch.empty_like, node.meta["val"]
            )


def mode_of(node: fx.Node) -> Any:
    """The mode of the tensors without memory that a node carries, or None."""
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return next((one.fake_mode for one in leaves if isinstance(one, torch._subclasses.FakeTensor)), None)
