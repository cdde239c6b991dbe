"""Insert reloads into the forward or the backward graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mempool.torch.compiled import ops
from mempool.torch.compiled.passes.insertion_points import maker_of
from mempool.torch.compiled.passes.node_index import Side, copied

if TYPE_CHECKING:
    from torch import fx

    from mempool.torch.compiled.passes.node_index import Numbered
    from solvers.rewriting.records import Reload


def bring(
    step: Numbered,
    side: Side,
    base: int,
    one: Reload,
    handle: fx.Node,
    *,
    at_once: bool,
) -> None:
    """Give the readers of one reload the reloaded value and views of that value, within one graph.

    Args:
        step: both graphs.
        side: the graph to change.
        base: the offloaded value.
        one: the reload.
        handle: the end of the offload.
        at_once: true if the reload is synchronous.
    """
    readers = set(one.consumers)
    views: set[fx.Node] = set()

    def ours(node: fx.Node | None) -> list[fx.Node]:
        return [] if node is None else [n for n in node.users if n in views or step.reads(n, readers)]

    for value in step.views(base):
        node, view = side.find(value), step.value[value]
        users, maker = ours(node), maker_of(view)
        if users and not (side.has(maker) and step.reads(maker, readers)):
            with side.graph.inserting_before(min(users)):
                new = copied(side.graph, maker, side)
            views.add(new[maker])
            for user in users:
                user.replace_input_with(node, new[view])
    node = side.find(base)
    if users := ours(node):
        if at_once:
            with side.slots.right_before(min(users)):
                tensor = side.slots.call(ops.fetched, side.get(handle), *_place(step, side, step.value[base]))
        else:
            tensor = _copied_back(step, side, base, one, handle, min(users))
        for user in users:
            user.replace_input_with(node, tensor)


def _copied_back(
    step: Numbered, side: Side, base: int, one: Reload, handle: fx.Node, first: fx.Node
) -> fx.Node:
    place = _place(step, side, step.value[base])
    ticket = side.get(handle)
    with _beginning(step, side, one, ticket, first):
        coming = side.slots.call(ops.swap_in, ticket, *place)
    with side.slots.right_before(first):
        return side.slots.call(ops.swapped_in, coming, *place)


def _beginning(step: Numbered, side: Side, one: Reload, ticket: fx.Node, first: fx.Node) -> Any:
    """Return the insertion point for the begin of a reload, never before the end of the offload."""
    if one.trigger < 0:
        return side.slots.right_before(first)
    count = len(step.graph)
    again = one.trigger - count
    trigger = step.again.get(again, first) if again >= 0 else step.operation[one.trigger]
    if not side.has(trigger):
        return side.slots.right_before(first) if side.is_forward else side.slots.begin()
    if side.is_forward and trigger < ticket:
        trigger = ticket
    return side.slots.after(trigger) if trigger < first else side.slots.right_before(first)


def _place(step: Numbered, side: Side, value: fx.Node) -> tuple[Any, ...]:
    """Return size, stride, type and device of a tensor; sizes known only at run time are nodes."""
    val = value.meta["val"]
    size = [_number(step, side, value, torch.ops.aten.sym_size.int, i, n) for i, n in enumerate(val.shape)]
    stride = [
        _number(step, side, value, torch.ops.aten.sym_stride.int, i, n) for i, n in enumerate(val.stride())
    ]
    return size, stride, val.dtype, val.device


def _number(step: Numbered, side: Side, value: fx.Node, operation: Any, dim: int, number: Any) -> Any:
    if not isinstance(number, torch.SymInt):
        return number
    known = [n for n in value.users if n.target is operation and n.args == (value, dim)]
    if not known:
        with step.halves.forward.graph.inserting_after(value):
            known = [step.halves.forward.graph.call_function(operation, (value, dim))]
        known[0].meta["val"] = number
    return side.get(known[0])
