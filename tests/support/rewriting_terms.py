"""Symbolic execution of graphs: each value as a term of its operation and the operation's inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting import Role

if TYPE_CHECKING:
    from solvers.rewriting import Graph


def contents_by_running(graph: Graph) -> list[object]:
    """Run every operation and return the term of each value."""
    made: list[object] = [("input", v) if p < 0 else None for v, p in enumerate(graph.producer.tolist())]
    for op, name in enumerate(graph.names):
        read = [made[v] for v in graph.read_by(op).tolist()]
        assert None not in read, "a value is read before its producer runs"
        moved = graph.role[op] in (Role.OFFLOAD, Role.RELOAD)
        for place, value in enumerate(np.flatnonzero(graph.producer == op).tolist()):
            made[value] = read[0] if moved else (name.split(".")[-1], place, *read)
    return made
