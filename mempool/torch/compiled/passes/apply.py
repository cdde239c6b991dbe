"""Apply a decision to both graphs of a step: offload, reload and recompute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool.torch.compiled.passes import offload, recompute, reload
from mempool.torch.compiled.passes.insertion_points import maker_of
from mempool.torch.compiled.passes.node_index import Numbered, erase_unused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import fx

    from mempool.torch.compiled.capture import Captured
    from mempool.torch.compiled.merged_graph import Joined
    from solvers.rewriting.records import Rewriting


def apply(
    joined: Joined,
    captured: Captured,
    rewriting: Rewriting,
    *,
    host_limit: int = 0,
    own_bytes: int = 0,
    places: Mapping[int, int] | None = None,
) -> Mapping[fx.Node, int]:
    """Change both graphs of `joined` so that they carry out a decision.

    Args:
        joined: the graphs.
        captured: the numbered graph that the decision refers to, from ``joined.module``.
        rewriting: the decision, valid for `solvers.rewriting.apply_rewriting`; offloaded values are made in
            the forward pass.
        host_limit: most bytes of host memory; 0: half of the free memory.
        own_bytes: copies of at most this size are made synchronously, at the time when they must have ended.
        places: by value, the offset of the copy in the host arena; a value without an entry goes anywhere.

    Returns:
        The run of each node of the two graphs that runs an operation.
    """
    step = Numbered(joined, captured)
    recompute.recompute(step, rewriting.recomputed)
    # In one slot, first offloads begin, then other offloads end, then reloads begin: so reloads find room.
    at = (places or {}).get
    begun = [(swap, offload.begin(step, swap, host_limit, at(swap.value, -1))) for swap in rewriting.offloads]
    small = {swap.value for swap in rewriting.offloads if captured.graph.size[swap.value] <= own_bytes}
    ended = []
    for swap, ticket in begun:
        at_once = swap.value in small
        ended.append((swap, offload.end(step, swap, ticket, at_once=at_once)))
    for swap, handle in ended:
        at_once = swap.value in small
        # The last reload first: the readers are found through views that an earlier reload has not copied
        # yet.
        for side in (step.backward, step.forward):
            for one in sorted(swap.reloads, key=lambda one: min(one.consumers), reverse=True):
                reload.bring(step, side, swap.value, one, handle, at_once=at_once)
    for swap, _ in ended:
        _forget_views(step, swap.value)
    for swap, ticket in begun:
        if swap.value in small:
            step.halves.forward.graph.erase_node(ticket)
    step.handover.settle()
    recompute.drop(step)
    for half in (step.halves.forward, step.halves.backward):
        half.graph.lint()
        half.recompile()
    return step.run


def _forget_views(step: Numbered, base: int) -> None:
    """Erase unread views in the backward pass, which would keep the viewed memory alive."""
    nodes = (step.value[value] for value in step.views(base))
    makers = (maker_of(node) for node in nodes if node is not None and not step.is_forward(node))
    for maker in dict.fromkeys(makers):
        erase_unused(step.halves.backward.graph, maker)
