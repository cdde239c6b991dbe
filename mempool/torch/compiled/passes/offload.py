"""Insert offloads into the forward graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.torch.compiled import ops
from mempool.torch.compiled.merged_graph import output_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

    from mempool.torch.compiled.passes.node_index import Numbered
    from solvers.rewriting.records import Offload


def begin(step: Numbered, swap: Offload, host_limit: int, at: int) -> fx.Node:
    """Insert the begin of an offload; `at` is the offset in the host arena, or -1 for any place."""
    value, slots = step.value[swap.value], step.forward.slots
    assert value is not None
    # Otherwise inductor would compute a value that is not yet in memory twice: once into memory that only the
    # copy reads, and once for the other readers.
    value.meta["inductor_realize_to_strides"] = True
    with slots.after(value) if swap.after < 0 else _after(step, swap.after):
        return slots.call(ops.swap_out, value, host_limit, at)


def _after(step: Numbered, run: int) -> Any:
    """Return the insertion point after a run; for a backward run, the end of the forward graph."""
    node = step.operation[run] if run < len(step.graph) else None
    if step.is_forward(node):
        return step.forward.slots.after(node)
    return step.forward.slots.before(output_of(step.halves.forward))


def end(step: Numbered, swap: Offload, ticket: fx.Node, *, at_once: bool) -> fx.Node:
    """Insert the end of an offload, after which the memory may be freed.

    Args:
        step: both graphs.
        swap: the decision.
        ticket: the begin of the offload.
        at_once: true if the offload is synchronous and happens here; the begin is unused then.
    """
    slots = step.forward.slots
    with _place(step, swap, ticket):
        if at_once:
            return slots.call(ops.sent, *ticket.args)
        return slots.call(ops.swapped_out, ticket, step.value[swap.value])


def _place(step: Numbered, swap: Offload, ticket: fx.Node) -> Any:
    """Return the insertion point for the end of an offload, at the latest before a forward reload begins."""
    slots = step.forward.slots
    back = {run for one in swap.reloads for run in one.consumers}
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


def _readers(step: Numbered, swap: Offload, ticket: fx.Node) -> Iterator[fx.Node]:
    """Yield forward operations after the begin of an offload that read the value or a view."""
    for value in (swap.value, *step.views(swap.value)):
        node = step.forward.find(value)
        for user in () if node is None else node.users:
            if user.op != "output" and ticket < user and user in step.run:
                yield user
