"""Merging of reloads that one compiled kernel would read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from solvers.rewriting.rewriting import SwapIn
from solvers.rewriting.runs import Runs

if TYPE_CHECKING:
    from collections.abc import Collection

    from solvers.rewriting.graph import Graph
    from solvers.rewriting.rewriting import Rewriting, Swap


def shared(graph: Graph, rewriting: Rewriting, together: Collection[frozenset[int]]) -> Rewriting:
    """Let all runs that a compiler fuses into one kernel read the same reload of a value.

    The first of these reloads is kept, and serves the readers of all merged reloads.

    Args:
        graph: the captured graph.
        rewriting: decisions about this graph.
        together: for each kernel the runs inside; a run may be in several kernels.
    """
    runs = Runs(graph, rewriting)
    several = [group for group in together if len(group) > 1]

    def first(back: SwapIn) -> tuple[int, bool, int]:
        return min(map(runs.place, back.consumers))

    def with_one(swap: Swap) -> Swap:
        ins = swap.ins
        for group in several if len(ins) > 1 else ():
            same = [back for back in ins if not group.isdisjoint(back.consumers)]
            if len(same) > 1:
                readers = sorted((run for back in same for run in back.consumers), key=runs.place)
                one = SwapIn(tuple(readers), min(same, key=first).trigger)
                ins = (*(back for back in ins if back not in same), one)
        return swap if ins is swap.ins else replace(swap, ins=tuple(sorted(ins, key=first)))

    return replace(rewriting, swaps=tuple(map(with_one, rewriting.swaps)))
