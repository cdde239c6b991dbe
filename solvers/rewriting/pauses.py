"""The pause between the two passes of a graph that is a part of a step, while which the other parts run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers.rewriting.graph import Graph, Role
from solvers.rewriting.timed import simulate
from solvers.swap.link import Link

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.rewriting.rewriting import Rewriting, Swap

PAUSE = "pause"


def paused(graph: Graph, workspace: int = 0) -> Graph:
    """The graph with an operation in front of its backward pass that reads and makes nothing.

    What is copied out of before it is awaited by it.

    Args:
        graph: with a backward pass, rewritten or not.
        workspace: bytes that are there during the pause alone.
    """
    at = int(graph.backward.argmax())

    def put(column: NDArray[Any], value: float) -> NDArray[Any]:
        return np.insert(column, at, value)

    control = graph.control + (graph.control >= at)
    outs = np.flatnonzero(graph.role[:at] == Role.SWAP_OUT)
    awaited = np.stack([outs, np.full(len(outs), at)], axis=1)
    return graph.with_columns(
        seconds=put(graph.seconds, 0.0),
        workspace=put(graph.workspace, workspace),
        backward=put(graph.backward, 1),
        repeatable=put(graph.repeatable, 0),
        role=put(graph.role, Role.ORIGINAL),
        kind=put(graph.kind, -1),
        module=put(graph.module, -1),
        producer=graph.producer + (graph.producer >= at),
        reads_start=put(graph.reads_start, graph.reads_start[at]),
        control=np.concatenate([control, awaited]),
        names=(*graph.names[:at], PAUSE, *graph.names[at:]),
    )


def between(graph: Graph) -> int:
    """Bytes on the device between the two passes of a graph, rewritten or not."""
    during = paused(graph)
    return int(simulate(during, Link.of_rate(1.0)).load[during.names.index(PAUSE)])


def unpaused(graph: Graph, rewriting: Rewriting) -> Rewriting:
    """Decisions about a graph that has a pause, as they are for the graph without.

    Args:
        graph: without.
        rewriting: for the graph with it.
    """
    at = int(graph.backward.argmax())

    def behind(run: int) -> int:
        """A run that something stands behind: behind the pause is behind the forward pass."""
        return run - (run >= at)

    def before(run: int) -> int:
        """A run that something stands before: before the pause is before the backward pass."""
        return run - (run > at)

    def without(swap: Swap) -> Swap:
        ins = tuple(
            replace(back, consumers=tuple(map(before, back.consumers)), trigger=behind(back.trigger))
            for back in swap.ins
        )
        return replace(swap, ins=ins, after=behind(swap.after), release=before(swap.release))

    return replace(rewriting, swaps=tuple(map(without, rewriting.swaps)))
