"""What a graph computes, as terms: nothing but who made a value from what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting import Role

if TYPE_CHECKING:
    from solvers.rewriting import Graph


def contents_by_running(graph: Graph) -> list[object]:
    """What each value is, by doing every operation: a term of its operation and what it read."""
    made: list[object] = [("input", v) if p < 0 else None for v, p in enumerate(graph.producer.tolist())]
    for op, name in enumerate(graph.names):
        read = [made[v] for v in graph.read_by(op).tolist()]
        assert None not in read, "read before it is made"
        moved = graph.role[op] in (Role.OFFLOAD, Role.RELOAD)
        for place, value in enumerate(np.flatnonzero(graph.producer == op).tolist()):
            made[value] = read[0] if moved else (name.split(".")[-1], place, *read)
    return made
