"""Judge of rewritten graphs: simulates bytes and times, without code of the decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting.graph import Role
from solvers.rewriting.records import Simulation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph
    from solvers.swap.link import Link


def simulate(graph: Graph, link: Link, *, outside_bytes: int = 0) -> Simulation:
    """Simulate a graph in order, with one queue of copies for each direction, or one for both.

    The program requests an offload or reload at its position, and a queue runs its copies in the order of the
    requests. The program waits for an offload, and then frees the memory, before the first operation with a
    control edge from the offload, or without such an edge before the next operation that is no offload. The
    program waits for a reload before the readers of the output. The seconds of a transfer operation are the
    program's own time for the request.

    Args:
        graph: a step, rewritten or not.
        link: the copy times.
        outside_bytes: bytes always on the device outside the graph, such as the optimizer's state.
    """
    awaited = _awaited(graph)
    begins, wait, seconds = _clock(graph, link, awaited)
    load, host_load = _loads(graph, awaited)
    size = _memory(graph)
    ends = [(graph.role == role).nonzero()[0] for role in (Role.OFFLOAD, Role.RELOAD)]
    moved, returned = (int(sum(size[graph.read_by(op)[0]] for op in ops.tolist())) for ops in ends)
    return Simulation(
        load=load + outside_bytes,
        host_load=host_load,
        begins=begins,
        wait=wait,
        seconds=seconds,
        recomputed_seconds=float(graph.seconds[graph.role == Role.RECOMPUTED].sum()),
        moved_bytes=moved,
        returned_bytes=returned,
    )


def _memory(graph: Graph) -> NDArray[np.int64]:
    """Return the bytes of each value's memory, its own or its base's."""
    result: NDArray[np.int64] = graph.size[graph.base]
    return result


def _awaited(graph: Graph) -> dict[int, int]:
    """Return for each offload the operation that waits for the copy; N if none follows."""
    outs = np.flatnonzero(graph.role == Role.OFFLOAD).tolist()
    found = dict.fromkeys(outs, len(graph))
    for earlier, later in graph.control.tolist():
        if earlier in found:
            found[earlier] = min(found[earlier], later)
    others = np.flatnonzero(graph.role != Role.OFFLOAD)
    for op in outs:
        if found[op] == len(graph):
            after = int(np.searchsorted(others, op))
            found[op] = int(others[after]) if after < len(others) else len(graph)
    return found


def _clock(
    graph: Graph, link: Link, awaited: dict[int, int]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Return the start of each operation, the program's wait before, and the end of the step."""
    begins, wait = np.zeros(len(graph)), np.zeros(len(graph))
    waits_for: dict[int, list[int]] = {}
    for out, later in awaited.items():
        waits_for.setdefault(later, []).append(out)
    size, role, seconds = _memory(graph).tolist(), graph.role.tolist(), graph.seconds.tolist()
    maker = graph.producer.tolist()
    done: dict[int, float] = {}  # end time of each copy
    free, now = [0.0, 0.0], 0.0
    for op in range(len(graph)):
        read = graph.read_by(op).tolist()
        copies = [done[maker[value]] for value in read if maker[value] in done]
        issued = max([now, *(done[out] for out in waits_for.get(op, ()))])
        if role[op] in (Role.OFFLOAD, Role.RELOAD):
            queue = 0 if role[op] == Role.OFFLOAD or not link.duplex else 1
            model = link.out if role[op] == Role.OFFLOAD else link.back
            begins[op] = max([issued, free[queue], *copies])
            done[op] = free[queue] = begins[op] + float(model(np.array(size[read[0]])))
            wait[op], now = issued - now, issued + seconds[op]
        else:
            begins[op] = max([issued, *copies])
            wait[op], now = begins[op] - now, begins[op] + seconds[op]
    last = max([now, *(done[out] for out in waits_for.get(len(graph), ()))])
    if len(graph):
        wait[-1] += last - now
    return begins, wait, last


def _loads(graph: Graph, awaited: dict[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the bytes on the device and on the host during each operation.

    A memory is held from the start of its producer, or from the beginning, to the end of the last reader of
    the memory or of a view. A copy out reads until the operation before which the program waits. Lasting
    memory is held to the end.
    """
    n, m = len(graph), len(graph.size)
    start = np.maximum(graph.producer, 0)
    end = start + 1
    until = np.arange(1, n + 1)
    for out, later in awaited.items():
        until[out] = max(later, out + 1)
    np.maximum.at(end, graph.base[graph.reads], until[graph.reader])
    np.maximum.at(end, graph.base, np.where(graph.lasting, n, 0))
    first = np.full(m, n)
    np.minimum.at(first, graph.base, start)
    end = np.minimum(end, n)
    result = []
    for where, extra in ((~graph.host, graph.workspace), (graph.host, None)):
        rows = np.flatnonzero(where & (graph.base == np.arange(m)))
        change = np.zeros(n + 1, np.int64)
        np.add.at(change, first[rows], graph.size[rows])
        np.add.at(change, end[rows], -graph.size[rows])
        load: NDArray[np.int64] = np.cumsum(change[:-1])
        result.append(load if extra is None else load + extra)
    return result[0], result[1]
