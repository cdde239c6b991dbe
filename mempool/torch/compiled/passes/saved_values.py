"""Track the saved values that the forward graph hands to the backward graph while both are changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from mempool.torch.compiled.merged_graph import FORWARD_NAME, output_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.torch.compiled.merged_graph import Halves

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


class Handover:
    """The forward nodes available in the backward graph; nodes can be added, and unused ones removed.

    AOTAutograd expects tensors, then numbers, in the forward graph's results; numbers, then tensors, in the
    backward graph's placeholders.
    """

    def __init__(self, halves: Halves) -> None:
        self.halves = halves
        self._given = dict(halves.handed)
        self._forward_of = {name: halves.forward_nodes[name] for name in self._given}
        self._new: list[str] = []
        placeholders = halves.backward.graph.find_nodes(op="placeholder")
        tensors = [n for n in placeholders if not (n.name in self._given and is_number(n))]
        self._first_tensor: fx.Node = tensors[0] if tensors else self.begin

    def find(self, node: fx.Node) -> fx.Node | None:
        """Return the backward node of a forward node, or None if the forward node is not handed over."""
        return self._given.get(node.name)

    def get(self, node: fx.Node) -> fx.Node:
        """Return the backward node of a forward node; add the hand-over if missing."""
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
        """Return the first backward node that is no placeholder."""
        return next(n for n in self.halves.backward.graph.nodes if n.op != "placeholder")

    def settle(self) -> None:
        """Update both graphs so that exactly the used nodes are handed over."""
        halves = self.halves
        gone = {name: n for name, n in self._given.items() if not n.users and _is_tensor(n)}
        before = [node for node in halves.saved if node.name not in gone]  # numbers stay: sizes may need them
        new = [self._forward_of[name] for name in self._new if name not in gone]
        tensors = [node for node in reversed(new) if not is_number(node)]
        for node in gone.values():
            halves.backward.graph.erase_node(node)
        _return(halves, [*tensors, *before, *filter(is_number, new)])


def _is_tensor(node: fx.Node) -> bool:
    return node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)


def is_number(node: fx.Node) -> bool:
    """Return true if a node is a number known at run time."""
    return isinstance(node.meta.get("val"), _NUMBERS)


def _return(halves: Halves, saved: Sequence[fx.Node]) -> None:
    output = output_of(halves.forward)
    results: Any = output.args[0]
    output.args = ((*results[: halves.outputs], *saved),)
    if "desc" in output.meta:
        output.meta["desc"] = [*output.meta["desc"][: halves.outputs], *_described(saved)]
    if "output_stack_traces" in output.meta:
        traces = output.meta["output_stack_traces"][: halves.outputs]
        output.meta["output_stack_traces"] = [*traces, *(n.meta.get("stack_trace") for n in saved)]


def _described(saved: Sequence[fx.Node]) -> list[Any]:
    from torch._functorch._aot_autograd import descriptors

    unchecked = getattr(descriptors, "SavedForBackwardsNoVcCheckAOTOutput", None)
    checked = descriptors.SavedForBackwardsAOTOutput
    return [
        unchecked(i) if unchecked and node.meta.get("saved_tensor_with_no_vc_check") else checked(i)
        for i, node in enumerate(saved)
    ]
