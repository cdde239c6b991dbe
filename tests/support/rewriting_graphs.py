"""Graphs of steps and random decisions for the tests of rewriting."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from solvers.rewriting import Graph, Offload, Reload, Rewriting, Role
from solvers.rewriting.apply import COPY_OPERATORS
from solvers.rewriting.runs import Runs

if TYPE_CHECKING:
    from collections.abc import Callable

    Draw = Callable[..., Any]


def graph_of(
    size: list[int],
    producer: list[int],
    reads: list[list[int]],
    *,
    backward: list[bool] | None = None,
    **columns: Any,
) -> Graph:
    """Return a graph of the values' sizes and producers and the operations' inputs, and other columns."""
    n, m = len(reads), len(size)
    given: dict[str, Any] = {
        "seconds": np.ones(n),
        "workspace": np.zeros(n),
        "backward": np.zeros(n, bool) if backward is None else backward,
        "repeatable": np.ones(n, bool),
        "role": np.zeros(n),
        "kind": np.zeros(n),
        "module": np.full(n, -1),
        "base": np.arange(m),
        "content": np.arange(m),
        "rank": np.full(m, 2),
        "lasting": np.zeros(m, bool),
        "movable": np.ones(m, bool),
        "host": np.zeros(m, bool),
        "control": np.zeros((0, 2)),
        "names": tuple(f"op{i}" for i in range(n)),
        "kinds": ("op",),
    }
    return Graph(
        **(given | columns),
        size=size,
        producer=producer,
        reads_start=np.cumsum([0, *map(len, reads)]),
        reads=[value for row in reads for value in row],
    )


def chain(depth: int, size: int = 1 << 20) -> Graph:
    """Return a batch through ``depth`` layers and back, each layer's output read by its gradient.

    Value 0 is the batch, value i layer i's output, value depth + i the i-th gradient.
    """
    forward = [[i] for i in range(depth)]
    backward = [[depth - 1 - i, *([] if i == 0 else [depth + i])] for i in range(depth)]
    return graph_of(
        size=[size] * (2 * depth + 1),
        producer=[-1, *range(2 * depth)],
        reads=forward + backward,
        backward=[False] * depth + [True] * depth,
        lasting=np.arange(2 * depth + 1) == 0,
    )


@st.composite
def graphs(draw: Draw, *, most_ops: int = 10, views: bool = True, control: bool = True) -> Graph:
    """Draw a step: inputs, a forward and a backward pass, views of views' bases, control edges.

    Operations make one or two values; some are not repeatable, some values are not movable or last.
    """
    size, producer, base, reads = [], [], [], list[list[int]]()
    for _ in range(draw(st.integers(0, 3))):
        size.append(draw(st.integers(0, 8)))
        producer.append(-1)
        base.append(len(base))
    n = draw(st.integers(1, most_ops) | st.integers(most_ops - 2, most_ops))
    for op in range(n):
        known = len(size)
        read = draw(st.lists(st.integers(0, known - 1), max_size=3)) if known else []
        read += [known - 1] * (known > 0 and draw(st.booleans()))
        reads.append(read)
        for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
            of = draw(st.sampled_from(read)) if views and read and draw(st.integers(0, 2)) == 0 else -1
            base.append(len(base) if of < 0 else base[of])
            size.append(draw(st.integers(0, 8)) if of < 0 else 0)
            producer.append(op)
    turn = draw(st.integers(0, n))
    pair = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).map(sorted)
    pairs = draw(st.lists(pair, max_size=3)) if control else []
    m = len(size)
    few_values, few_operations = (
        st.sets(st.integers(0, m - 1), max_size=2),
        st.sets(st.integers(0, n - 1), max_size=2),
    )
    lasting, still, once = draw(few_values), draw(few_values), draw(few_operations)
    return graph_of(
        size,
        producer,
        reads,
        backward=[op >= turn for op in range(n)],
        repeatable=[op not in once for op in range(n)],
        base=base,
        control=[p for p in pairs if p[0] < p[1]],
        seconds=draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=n, max_size=n)),
        workspace=draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)),
        rank=draw(st.lists(st.sampled_from([2, 4, 3, 2, 1, -1]), min_size=m, max_size=m)),
        lasting=[v in lasting for v in range(m)],
        movable=[v not in still for v in range(m)],
        module=draw(st.lists(st.integers(-1, 2), min_size=n, max_size=n)),
        modules=("encoder", "encoder.1", "head"),
        kind=draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)),
        kinds=("aten.mm", "aten.relu"),
    )


def reverted(graph: Graph) -> Graph:
    """Return the graph without offloads, reloads and recomputed operations: undo `apply_rewriting`."""
    keep = graph.role == Role.ORIGINAL
    if keep.all():
        return graph
    number = np.cumsum(keep) - 1
    there = (graph.producer < 0) | keep[graph.producer]
    moved = np.isin(graph.role, (Role.OFFLOAD, Role.RELOAD)).any()
    counts = np.diff(graph.reads_start)
    operations = ("seconds", "workspace", "backward", "repeatable", "role", "kind", "module")
    values = ("size", "rank", "lasting", "movable", "host")
    producer = graph.producer[there]
    control = graph.control[keep[graph.control].all(axis=1)]
    return graph.with_columns(
        **{name: getattr(graph, name)[keep] for name in operations},
        **{name: getattr(graph, name)[there] for name in values},
        producer=np.where(producer < 0, -1, number[producer]),
        base=graph.content[graph.base[there]],
        content=graph.content[there],
        reads_start=np.concatenate([[0], np.cumsum(counts[keep])]),
        reads=graph.content[graph.reads[keep[graph.reader]]],
        control=number[control],
        names=tuple(name for name, kept in zip(graph.names, keep.tolist(), strict=True) if kept),
        kinds=graph.kinds[: -len(COPY_OPERATORS)] if moved else graph.kinds,
    )


def offload_candidates(graph: Graph) -> list[int]:
    """Return the values that an offload may name."""
    lasts = {int(b) for b in graph.base[graph.lasting]}
    return [
        v for v in range(len(graph.size))
        if graph.base[v] == v and graph.movable[v] and not graph.host[v] and v not in lasts
    ]  # fmt: skip


def recomputable(graph: Graph) -> list[int]:
    """Return the values that can be recomputed on their own: by repeatable operations, views included."""
    stays = {int(op) for op in graph.control[:, 0]}

    def again(value: int) -> bool:
        op = int(graph.producer[value])
        return op >= 0 and not graph.backward[op] and bool(graph.repeatable[op]) and op not in stays

    views = {v: np.flatnonzero(graph.base == v).tolist() for v in range(len(graph.size))}
    forward = {v: [w for w in views[v] if not graph.backward[graph.producer[w]]] for v in views}
    return [v for v in views if again(v) and all(again(w) for w in forward[v])]


@st.composite
def rewritings(draw: Draw, graph: Graph, *, swaps: bool = True, recompute: bool = True) -> Rewriting:
    """Draw possible decisions: groups of readers, triggers, releases, recomputed values."""
    n, again = len(graph), recomputable(graph)
    recomputed = (
        sorted(set(draw(st.lists(st.sampled_from(again), max_size=3)))) if recompute and again else []
    )
    runs = Runs(graph, Rewriting(recomputed=tuple(recomputed)))
    everything = sorted([*range(n), *(n + op for op in runs.before)], key=runs.place)
    where = {run: i for i, run in enumerate(everything)}
    made, again_of = [], {int(graph.base[v]) for v in runs.recomputed}
    for value in offload_candidates(graph) if swaps else []:
        if value in again_of or draw(st.booleans()):
            continue
        first = where.get(int(graph.producer[value]), -1)
        readers = [r for r in everything[first + 1 :] if _can_read_back(graph, runs, r, value)]
        after = draw(st.integers(first, len(everything) - 1)) if draw(st.booleans()) else first
        readers = [r for r in readers if where[r] > after and draw(st.integers(0, 3))]
        groups = list[list[int]]()
        for r in readers:
            if not groups or draw(st.booleans()):
                groups.append([])
            groups[-1].append(r)
        ins = []
        for group in groups:
            start = draw(st.integers(after, where[group[0]] - 1))
            trigger = -1 if start < 0 or draw(st.booleans()) else everything[start]
            ins.append(Reload(tuple(group), trigger))
        later = everything[after + 1 :]
        release = draw(st.sampled_from(later)) if later and draw(st.booleans()) else -1
        place = -1 if after == first else everything[after]
        made.append(Offload(value, tuple(ins), place, release))
    return Rewriting(tuple(made), tuple(recomputed))


def _can_read_back(graph: Graph, runs: Runs, run: int, value: int) -> bool:
    """Return true if a run reads a memory through repeatable views alone."""
    through = {v for v in graph.read_by(runs.operation(run)).tolist() if graph.base[v] == value}
    seen = set[int]()
    while through - seen - {value}:
        v = min(through - seen - {value})
        seen.add(v)
        maker = int(graph.producer[v])
        if not graph.repeatable[maker]:
            return False
        through |= {w for w in graph.read_by(maker).tolist() if graph.base[w] == value}
    return bool(through)


def same_graph(one: Graph, other: Graph) -> bool:
    """Return true if every column is equal."""
    return all(np.array_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(Graph))
