"""Splitting of decisions for two graphs, one of the forward and one of the backward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from solvers.rewriting.rewriting import Rewriting, Swap, SwapIn

if TYPE_CHECKING:
    from solvers.rewriting.graph import Graph


def by_pass(graph: Graph, rewriting: Rewriting) -> Rewriting:
    """Change the decisions so that no copy and no wait spans both passes.

    The copy out of a value from the forward pass begins, and is waited for, within the forward pass. If
    readers are in both passes, each pass has a separate reload; a reload for the backward pass begins there.
    Rewriting the whole graph with these decisions equals rewriting the two graphs. Only absences span both
    passes.
    """
    if not graph.backward.any() or graph.backward.all():
        return rewriting
    turn = int(graph.backward.argmax())
    return replace(rewriting, swaps=tuple(_within(graph, swap, turn) for swap in rewriting.swaps))


def _within(graph: Graph, swap: Swap, turn: int) -> Swap:
    n, made = len(graph), int(graph.producer[swap.value])
    if made >= turn:
        return swap

    def is_forward(run: int) -> bool:
        return run < n and not graph.backward[run]

    ins = []
    for back in swap.ins:
        early = tuple(run for run in back.consumers if is_forward(run))
        late = tuple(run for run in back.consumers if not is_forward(run))
        trigger = back.trigger
        if early:
            ins.append(SwapIn(early, trigger if trigger >= 0 and is_forward(trigger) else -1))
        if late:
            ins.append(SwapIn(late, turn - 1 if 0 <= trigger < turn else trigger))
    after = swap.after if swap.after < 0 or is_forward(swap.after) else turn - 1
    release = swap.release if swap.release < 0 or is_forward(swap.release) else turn
    return Swap(swap.value, tuple(ins), after, release)
