"""Graph passes that apply a decision: offload, reload and recompute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mempool.torch.compiled import ops
from mempool.torch.compiled.graph_editor import (
    GraphSide,
    NodeIndex,
    copy_operation,
    erase_unused,
    producing_node,
    result_nodes,
)
from mempool.torch.compiled.joint_graph import output_of
from solvers.rewriting.runs import Runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import fx

    from mempool.torch.compiled.graph import CapturedGraph
    from mempool.torch.compiled.joint_graph import MergedGraph
    from solvers.rewriting.records import Offload, Reload, Rewriting


def begin_offload(step: NodeIndex, swap: Offload, host_limit: int, at: int) -> fx.Node:
    """Insert the start of an offload; `at` is the offset in the host arena, or -1 for any offset."""
    value, slots = step.value[swap.value], step.forward.slots
    assert value is not None
    # Otherwise inductor would compute a value that is not yet in memory twice: into memory for the copy
    # alone, and for the other readers.
    value.meta["inductor_realize_to_strides"] = True
    with slots.after(value) if swap.after < 0 else _begin_point(step, swap.after):
        return slots.call(ops.offload, value, host_limit, at)


def _begin_point(step: NodeIndex, run: int) -> Any:
    """Return the insertion point after a run; for a backward run, the end of the forward graph."""
    node = step.operation[run] if run < len(step.graph) else None
    if step.is_forward(node):
        return step.forward.slots.after(node)
    return step.forward.slots.before(output_of(step.halves.forward))


def end_offload(step: NodeIndex, swap: Offload, ticket: fx.Node, *, at_once: bool) -> fx.Node:
    """Insert the end of an offload, after which the memory may be freed.

    Args:
        step: both graphs.
        swap: the decision.
        ticket: the begin of the offload.
        at_once: true for a synchronous offload at this point, without a start.
    """
    slots = step.forward.slots
    with _end_point(step, swap, ticket):
        if at_once:
            return slots.call(ops.offload_sync, *ticket.args)
        return slots.call(ops.offload_wait, ticket, step.value[swap.value])


def _end_point(step: NodeIndex, swap: Offload, ticket: fx.Node) -> Any:
    """Return the insertion point for the end of an offload, before any forward reload of the value."""
    slots = step.forward.slots
    back = {run for reload in swap.reloads for run in reload.consumers}
    readers = sorted(_readers(step, swap, ticket))
    own = [node for node in readers if not step.reads(node, back)]
    first = next((node for node in readers if step.reads(node, back)), output_of(step.halves.forward))
    if swap.release < 0:
        last = own[-1] if own else ticket
        return slots.after(last) if last < first else slots.before(first)
    release = step.operation[swap.release] if swap.release < len(step.graph) else None
    if step.is_forward(release) and ticket < release:
        return slots.before(min(release, first))
    return slots.before(first)


def _readers(step: NodeIndex, swap: Offload, ticket: fx.Node) -> Iterator[fx.Node]:
    """Yield the forward operations after the start of an offload that read the value or a view."""
    for value in (swap.value, *step.views(swap.value)):
        node = step.forward.find(value)
        for user in () if node is None else node.users:
            if user.op != "output" and ticket < user and user in step.run:
                yield user


def insert_reload(
    step: NodeIndex,
    side: GraphSide,
    base: int,
    reload: Reload,
    handle: fx.Node,
    *,
    at_once: bool,
) -> None:
    """Redirect the readers of one reload, within one graph, to the reloaded value and its views.

    Args:
        step: both graphs.
        side: the graph to change.
        base: the offloaded value.
        reload: the reload.
        handle: the end of the offload.
        at_once: true if the reload is synchronous.
    """
    readers = set(reload.consumers)
    views: set[fx.Node] = set()

    def ours(node: fx.Node | None) -> list[fx.Node]:
        return [] if node is None else [n for n in node.users if n in views or step.reads(n, readers)]

    for value in step.views(base):
        node, view = side.find(value), step.value[value]
        users, producer = ours(node), producing_node(view)
        if users and not (side.has(producer) and step.reads(producer, readers)):
            with side.graph.inserting_before(min(users)):
                new = copy_operation(side.graph, producer, side)
            views.add(new[producer])
            for user in users:
                user.replace_input_with(node, new[view])
    node = side.find(base)
    if users := ours(node):
        if at_once:
            with side.slots.directly_before(min(users)):
                tensor = side.slots.call(
                    ops.reload_sync, side.get(handle), *_layout_arguments(step, side, step.value[base])
                )
        else:
            tensor = _reload_asynchronously(step, side, base, reload, handle, min(users))
        for user in users:
            user.replace_input_with(node, tensor)


def _reload_asynchronously(
    step: NodeIndex,
    side: GraphSide,
    base: int,
    reload: Reload,
    handle: fx.Node,
    first: fx.Node,
) -> fx.Node:
    place = _layout_arguments(step, side, step.value[base])
    ticket = side.get(handle)
    with _reload_point(step, side, reload, ticket, first):
        coming = side.slots.call(ops.reload, ticket, *place)
    with side.slots.directly_before(first):
        return side.slots.call(ops.reload_wait, coming, *place)


def _reload_point(step: NodeIndex, side: GraphSide, reload: Reload, ticket: fx.Node, first: fx.Node) -> Any:
    """Return the insertion point for the start of a reload, after the end of the offload."""
    if reload.trigger < 0:
        return side.slots.directly_before(first)
    count = len(step.graph)
    recomputed_node = reload.trigger - count
    trigger = (
        step.recomputed_node.get(recomputed_node, first)
        if recomputed_node >= 0
        else step.operation[reload.trigger]
    )
    if not side.has(trigger):
        return side.slots.directly_before(first) if side.is_forward else side.slots.begin()
    if side.is_forward and trigger < ticket:
        trigger = ticket
    return side.slots.after(trigger) if trigger < first else side.slots.directly_before(first)


def _layout_arguments(step: NodeIndex, side: GraphSide, value: fx.Node) -> tuple[Any, ...]:
    """Return size, stride, type and device of a tensor; sizes known only at run time are nodes."""
    val = value.meta["val"]
    size = [
        _size_argument(step, side, value, torch.ops.aten.sym_size.int, i, n) for i, n in enumerate(val.shape)
    ]
    stride = [
        _size_argument(step, side, value, torch.ops.aten.sym_stride.int, i, n)
        for i, n in enumerate(val.stride())
    ]
    return size, stride, val.dtype, val.device


def _size_argument(
    step: NodeIndex, side: GraphSide, value: fx.Node, operation: Any, dim: int, number: Any
) -> Any:
    if not isinstance(number, torch.SymInt):
        return number
    known = [n for n in value.users if n.target is operation and n.args == (value, dim)]
    if not known:
        with step.halves.forward.graph.inserting_after(value):
            known = [step.halves.forward.graph.call_function(operation, (value, dim))]
        known[0].meta["val"] = number
    return side.get(known[0])


def recompute(step: NodeIndex, values: Iterable[int]) -> None:
    """Insert the recomputation of values and of their used views, each directly before the first reader.

    Inputs of a recomputation are saved, unless they are recomputed as well.
    """
    chosen = set(values)
    follow = {v for base in chosen for v in step.views(base) if step.is_forward(step.value[v])}
    for run in sorted({int(step.graph.producer[v]) for v in chosen | follow}, reverse=True):
        producer, find = step.operation[run], step.saved_values.find
        found = [
            (result, got)
            for result in result_nodes(producer)
            if (got := find(result)) is not None and got.users
        ]
        if not found:
            continue
        graph = step.halves.backward.graph
        with graph.inserting_before(min(user for _, got in found for user in got.users)):
            new = copy_operation(graph, producer, step.saved_values)
        step.recomputed_node[run] = new[producer]
        step.run[new[producer]] = len(step.graph) + run
        for result, got in found:
            got.replace_all_uses_with(new[result])


def erase_recomputed(step: NodeIndex) -> None:
    """Erase from the forward pass the operations that only the backward pass needs now."""
    for run in sorted(step.recomputed_node, reverse=True):
        erase_unused(step.halves.forward.graph, step.operation[run])


def apply(
    merged: MergedGraph,
    captured: CapturedGraph,
    rewriting: Rewriting,
    *,
    host_limit: int = 0,
    own_bytes: int = 0,
    places: Mapping[int, int] | None = None,
) -> Mapping[fx.Node, int]:
    """Change both graphs of `merged` so that they carry out a decision.

    Args:
        merged: the graphs.
        captured: the numbered graph that the decision refers to, from ``merged.module``.
        rewriting: the decision, valid for `solvers.rewriting.apply`; the forward pass makes the offloaded
            values.
        host_limit: most bytes of host memory; 0: half of the free memory.
        own_bytes: copies up to this size are synchronous, at the latest possible point.
        places: by value, the offset of the copy in the host arena; a value without an entry may use any
            offset.

    Returns:
        The run of each node of the two graphs that runs an operation.
    """
    step, place = NodeIndex(merged, captured), Runs(captured.graph, rewriting).place
    end = len(captured.graph), True, 0
    recompute(step, rewriting.recomputed)
    # In one slot, offloads start first, then other offloads end, then reloads start and find room.
    at = (places or {}).get
    # Copies of one slot start in the order of their waits, as in the simulation.
    leaving = sorted(rewriting.offloads, key=lambda swap: place(swap.release) if swap.release >= 0 else end)
    begun = [(swap, begin_offload(step, swap, host_limit, at(swap.value, -1))) for swap in leaving]
    small = {swap.value for swap in rewriting.offloads if captured.graph.size[swap.value] <= own_bytes}
    ended = []
    for swap, ticket in begun:
        at_once = swap.value in small
        ended.append((swap, end_offload(step, swap, ticket, at_once=at_once)))
    ended.sort(
        key=lambda one: min((place(run) for back in one[0].reloads for run in back.consumers), default=end)
    )
    for swap, handle in ended:
        at_once = swap.value in small
        # The last reload first: readers are found through views, which earlier reloads replace by copies.
        for side in (step.backward, step.forward):
            for reload in sorted(swap.reloads, key=lambda reload: min(reload.consumers), reverse=True):
                insert_reload(step, side, swap.value, reload, handle, at_once=at_once)
    for swap, _ in ended:
        _forget_views(step, swap.value)
    for swap, ticket in begun:
        if swap.value in small:
            step.halves.forward.graph.erase_node(ticket)
    step.saved_values.update_outputs()
    erase_recomputed(step)
    for half in (step.halves.forward, step.halves.backward):
        half.graph.lint()
        half.recompile()
    return step.run


def _forget_views(step: NodeIndex, base: int) -> None:
    """Erase unread views in the backward pass, which would keep the viewed memory alive."""
    nodes = (step.value[value] for value in step.views(base))
    makers = (producing_node(node) for node in nodes if node is not None and not step.is_forward(node))
    for producer in dict.fromkeys(makers):
        erase_unused(step.halves.backward.graph, producer)
