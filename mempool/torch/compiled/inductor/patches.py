"""Restrictions of inductor: buffers that it may overwrite, and rules that change rounding."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch import config
from torch._inductor import graph as lowering

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mempool.torch.compiled.joint_graph import MergedGraph
    from mempool.torch.compiled.records import StepDecision

#: True if this version of inductor accepts a list of donated buffers.
CAN_RESTRICT_DONATED = hasattr(lowering, "get_donated_idxs")


def dying_inputs(merged: MergedGraph, decision: StepDecision) -> Mapping[str, tuple[int, int]]:
    """Map the backward graph's inputs that are freed after their last readers to (memory, bytes).

    Keys are names of placeholders. A memory is a value of the captured graph, so that shared storages are one
    memory, or a negative number for a ticket.

    Args:
        merged: the graphs, with the decision applied.
        decision: the decision.
    """
    graph, halves, lasting = decision.captured.graph, merged.halves, decision.lasting
    inside = {merged.source[node]: value for node, value in decision.captured.value_of.items()}
    value_of = {node.name: value for node, value in inside.items() if node.graph is halves.forward.graph}
    given: dict[str, tuple[int, int]] = {}
    for i, (name, node) in enumerate(halves.saved_placeholders.items()):
        base = int(graph.base[value_of[name]]) if name in value_of else -1
        if base < 0 and isinstance(node.meta["val"], torch.Tensor):  # a ticket
            given[node.name] = -1 - i, node.meta["val"].nbytes
        elif base >= 0 and not lasting[base] and not graph.host[base]:
            given[node.name] = base, int(graph.size[base])
    return given


def donated_inputs(merged: MergedGraph, decision: StepDecision) -> list[int]:
    """Return the positions of the backward graph's inputs whose memory is not shared.

    The arguments are those of `dying_inputs`. PyTorch donates all saved values that share no memory with an
    argument or result of the function. But a value and its view may both be saved, and one could be read
    after the other was overwritten.
    """
    if not config.donated_buffer:
        return []
    given, lasting = dying_inputs(merged, decision), decision.captured.graph.lasting
    times = Counter(memory for memory, _ in given.values())
    own = {memory for memory, often in times.items() if memory >= 0 and often == 1 and not lasting[memory]}
    alone = {name for name, (memory, _) in given.items() if memory in own}
    inputs = merged.halves.backward.graph.find_nodes(op="placeholder")
    return [i for i, node in enumerate(inputs) if node.name in alone]


@contextlib.contextmanager
def restrict_donated(places: Sequence[int] | None) -> Iterator[None]:
    """Restrict inductor's donated buffers to these inputs of a backward graph, unless None."""
    if places is None or not CAN_RESTRICT_DONATED:
        yield
        return
    original = lowering.get_donated_idxs
    lowering.get_donated_idxs = lambda: list(places)
    try:
        yield
    finally:
        lowering.get_donated_idxs = original


#: Inductor's checks before it fuses a product and a sum into one operation (first: the product has no other
#: reader), or splits such an operation into two (second: depends on the readers of the sum).
_CHECKS = ("is_valid_addmm_fusion", "should_prefer_unfused_addmm")


@contextlib.contextmanager
def exact_rounding() -> Iterator[None]:
    """Disable the fusing and splitting of products and sums.

    The decisions for a limit change the readers of a value, and a fused product and sum differs in the last
    bits from a separate product and sum.
    """
    from torch._inductor.fx_passes import post_grad

    entries = [
        entry
        for patterns in getattr(post_grad, "pass_patterns", ())
        for found in patterns.patterns.values()
        for entry in found
        if getattr(entry.extra_check, "__name__", "") in _CHECKS
    ]
    checks = [entry.extra_check for entry in entries]
    for entry in entries:
        entry.extra_check = _reject
    try:
        yield
    finally:
        for entry, check in zip(entries, checks, strict=True):
            entry.extra_check = check


def _reject(_: Any) -> bool:
    return False
