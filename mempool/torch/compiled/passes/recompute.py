"""Recompute operations of the forward pass in the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool.torch.compiled.passes.insertion_points import results_of
from mempool.torch.compiled.passes.node_index import copied, erase_unused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mempool.torch.compiled.passes.node_index import Numbered


def recompute(step: Numbered, values: Iterable[int]) -> None:
    """Recompute values and the views of them that are read, each right before the first reader.

    Inputs of a recomputation are handed over, unless they are recomputed as well.
    """
    chosen = set(values)
    follow = {v for base in chosen for v in step.views(base) if step.is_forward(step.value[v])}
    for run in sorted({int(step.graph.producer[v]) for v in chosen | follow}, reverse=True):
        maker, find = step.operation[run], step.handover.find
        found = [(one, got) for one in results_of(maker) if (got := find(one)) is not None and got.users]
        if not found:
            continue
        graph = step.halves.backward.graph
        with graph.inserting_before(min(user for _, got in found for user in got.users)):
            new = copied(graph, maker, step.handover)
        step.again[run] = new[maker]
        step.run[new[maker]] = len(step.graph) + run
        for one, got in found:
            got.replace_all_uses_with(new[one])


def drop(step: Numbered) -> None:
    """Erase from the forward pass the operations that only the backward pass needs now."""
    for run in sorted(step.again, reverse=True):
        erase_unused(step.halves.forward.graph, step.operation[run])
