"""Slow models of rewritten graphs: terms of contents, peaks, and the shortest step of all decisions."""

from __future__ import annotations

import itertools

import numpy as np
from offload_oracle import least_stall
from rewriting_graphs import graph_of

from solvers.errors import PlanError
from solvers.rewriting import Graph, Role
from solvers.rewriting.decide import Decider
from solvers.rewriting.judge import simulate
from solvers.rewriting.records import Rewriting
from solvers.rewriting.step_conversion import graph_step, offloadable
from solvers.swap import Link


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


#: Most candidates for recompute; with more, enumerating all sets is refused.
_MOST_VALUES = 10


def least_seconds(
    graph: Graph, link: Link, limit: int, *, outside_bytes: int = 0, ticks: int = 1 << 10
) -> tuple[Rewriting, float] | None:
    """Return the decisions with the shortest step, and the seconds of this step, minimal in whole ticks.

    Every set of recomputed values is tried, the cheapest first; for each, CP-SAT proves the offloads of least
    stall.

    Args:
        graph: a graph in whose forward pass repeatable operations produce at most ten memories.
        link: the copy times.
        limit: bytes of the device.
        outside_bytes: bytes always on the device outside the graph.
        ticks: ticks per second; operations are rounded down to whole ticks, copies up.

    Returns:
        None if no decision holds the limit.

    Raises:
        ValueError: a larger graph.
        UnprovenError: nothing was proven for a set that may belong to the shortest step.
    """
    g = graph
    made = np.flatnonzero((g.producer >= 0) & (g.base == np.arange(len(g.size))))
    values = [v for v in made.tolist() if not g.backward[g.producer[v]] and g.repeatable[g.producer[v]]]
    if len(values) > _MOST_VALUES:
        raise ValueError(f"the oracle knows graphs of up to {_MOST_VALUES} values to recompute")
    best: tuple[Rewriting, float] | None = None
    for _, chosen in sorted(_durations(graph, values, outside_bytes)):
        plan = graph_step(graph, offloadable(graph), recomputed=chosen, outside=outside_bytes)
        if best is not None and plan.step.duration >= best[1]:
            break
        solved = least_stall(plan.step, link, limit, ticks=ticks, early=True)
        if solved is None:
            continue
        seconds = plan.step.duration + solved[1]
        if best is None or seconds < best[1]:
            best = Rewriting(plan.offloads(solved[0]), chosen), seconds
    return best


def _durations(graph: Graph, values: list[int], outside_bytes: int) -> list[tuple[float, tuple[int, ...]]]:
    """Return the seconds without waiting of each feasible set of recomputed values, equivalent sets once."""
    found: dict[bytes, tuple[float, tuple[int, ...]]] = {}
    for count in range(len(values) + 1):
        for chosen in itertools.combinations(values, count):
            try:
                plan = graph_step(graph, offloadable(graph), recomputed=chosen, outside=outside_bytes)
            except PlanError:
                continue
            key = plan.runs.tobytes() + plan.step.load.tobytes() + plan.base.tobytes()
            found.setdefault(key, (plan.step.duration, chosen))
    return list(found.values())


def small_net(seed: int, *, most: int = 6) -> Graph:
    """Return a network of sizes from 1 to 8 bytes; gradients read some inputs and outputs of their layers."""
    random = np.random.default_rng(seed)
    layers = int(random.integers(3, most + 1))
    size, producer, reads, seconds = [int(random.integers(1, 5))], [-1], list[list[int]](), list[float]()
    for layer in range(layers):
        skips = [0, *range(1, layer + 1)]
        read = sorted({layer, *random.choice(skips, int(random.integers(0, 2))).tolist()})
        reads.append(read)
        seconds.append(float(random.choice([0.25, 0.25, 0.5, 1.0, 2.0])))
        size.append(int(random.integers(1, 9)))
        producer.append(layer)
    grads: dict[int, int] = {}
    for layer in reversed(range(layers)):
        value = layer + 1
        read = [grads[value]] if value in grads else []
        read += [v for v in [*reads[layer], value] if random.random() < 0.6]
        op = len(reads)
        reads.append(list(dict.fromkeys(read)) or [value])
        seconds.append(2 * seconds[layer])
        grads[layer] = len(size)
        size.append(size[layer])
        producer.append(op)
    n = len(reads)
    repeatable = random.random(n) < 0.9
    return graph_of(
        size,
        producer,
        reads,
        backward=[op >= layers for op in range(n)],
        seconds=seconds,
        repeatable=repeatable,
        workspace=random.integers(0, 3, n),
        lasting=np.arange(len(size)) == 0,
    )


def limited_net(seed: int) -> tuple[Graph, Link, int]:
    """Return a small network, a link, and a limit from the least feasible one up to the peak."""
    graph, random = small_net(seed), np.random.default_rng(seed)
    out, back = random.choice([0.0625, 0.125, 0.25, 0.5], 2).tolist()
    link = Link(0.125, out, 0.125, back, bool(random.random() < 0.8))
    least, _ = Decider(graph, link).least()
    return graph, link, int(random.integers(least, simulate(graph, link).peak_bytes + 1))
