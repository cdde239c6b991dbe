"""Slow model of the judge of rewritten graphs, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solvers.rewriting import Role

if TYPE_CHECKING:
    from solvers.rewriting import Graph
    from solvers.swap import Link


def waited_at(graph: Graph, out: int) -> int:
    """Return the row before which a program waits for an offload."""
    edges = [later for earlier, later in graph.control.tolist() if earlier == out]
    others = [row for row in range(out + 1, len(graph)) if graph.role[row] != Role.OFFLOAD]
    return min(edges or others, default=len(graph))


def slow_loads(graph: Graph, *, host: bool) -> list[int]:
    """Return the bytes alive during each row, memory by memory."""
    loads = []
    for row in range(len(graph)):
        total = 0 if host else int(graph.workspace[row])
        for memory in range(len(graph.size)):
            if graph.base[memory] != memory or bool(graph.host[memory]) != host:
                continue
            names = [v for v in range(len(graph.size)) if graph.base[v] == memory]
            begins = min(max(int(graph.producer[v]), 0) for v in names)
            ends = max(max(int(graph.producer[v]), 0) for v in names)
            for v in names:
                for reader in graph.readers_of(v).tolist():
                    out = graph.role[reader] == Role.OFFLOAD
                    ends = max(ends, waited_at(graph, reader) - 1 if out else reader)
                if graph.lasting[v]:
                    ends = len(graph)
            total += int(graph.size[memory]) if begins <= row <= ends else 0
        loads.append(total)
    return loads


def slow_seconds(graph: Graph, link: Link) -> float:
    """Return the seconds at which the last operation or copy ends."""
    now, free = 0.0, {"out": 0.0, "in": 0.0}
    done: dict[int, float] = {}
    outs = [row for row in range(len(graph)) if graph.role[row] == Role.OFFLOAD]
    for row in range(len(graph) + 1):
        for out in outs:
            if waited_at(graph, out) == row:
                now = max(now, done[out])
        if row == len(graph):
            break
        read = graph.read_by(row).tolist()
        there = max([done.get(int(graph.producer[v]), 0.0) for v in read], default=0.0)
        role = int(graph.role[row])
        if role in (Role.OFFLOAD, Role.RELOAD):
            way = "out" if role == Role.OFFLOAD else "in"
            queue = way if link.duplex else "out"
            bytes_ = float(graph.size[graph.base[read[0]]])
            a, b = getattr(link, f"{way}_fixed"), getattr(link, f"{way}_per_byte")
            free[queue] = done[row] = max(now, free[queue], there) + a + b * bytes_
        else:
            now = max(now, there) + float(graph.seconds[row])
    return now
