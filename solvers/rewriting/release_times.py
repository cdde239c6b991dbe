"""Release times for copies out without one: as late as a limit allows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting.graph import Role
from solvers.rewriting.judge import simulate
from solvers.rewriting.rewrite import rewrite

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph
    from solvers.rewriting.rewriting import Rewriting
    from solvers.swap.link import Link


def released(
    graph: Graph, rewriting: Rewriting, link: Link, limit: int, *, outside_bytes: int = 0
) -> Rewriting:
    """Wait for each copy out when complete, or earlier if the memory is needed; other decisions stay.

    The published rules leave the release to the runtime, which frees the memory when the copy is complete.
    Copies out are waited for in the order in which they are made. A limit that cannot be held anyway is not
    enforced.

    Args:
        graph: the captured graph.
        rewriting: decisions about this graph.
        link: the copy times.
        limit: bytes of the device.
        outside_bytes: bytes always on the device outside the graph.
    """
    made = rewrite(graph, rewriting)
    outs = np.flatnonzero(made.role == Role.SWAP_OUT)
    free = link.__class__(0.0, 0.0, link.in_fixed, link.in_per_byte, link.duplex)
    timed = simulate(made, free, outside_bytes=outside_bytes)
    runs = runs_of(made, graph)
    size = made.size[made.base[np.array([made.read_by(int(op))[0] for op in outs], np.int64)]]
    rows = _rows(made, outs, link.out(size), size, limit - timed.load, timed.begins)
    rows = np.minimum(rows, _needed(made, outs))
    release = {
        int(made.content[made.read_by(op)[0]]): int(runs[row])
        for op, row in zip(outs.tolist(), rows.tolist(), strict=True)
        if row < len(made)
    }
    swaps = tuple(
        replace(swap, release=release.get(swap.value, -1)) if swap.release < 0 else swap
        for swap in rewriting.swaps
    )
    return replace(rewriting, swaps=swaps)


def _rows(
    made: Graph,
    outs: NDArray[np.int64],
    seconds: NDArray[np.float64],
    size: NDArray[np.int64],
    room: NDArray[np.int64],
    begins: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Return the row before which each copy out is waited for, N if none; ``room``: free bytes by row."""
    result = np.full(len(outs), len(made))
    pending, held, done, following = list[tuple[int, float]](), 0, 0.0, 0
    for row in range(len(made)):
        if following < len(outs) and outs[following] == row:
            done = max(done, float(begins[row])) + float(seconds[following])
            pending.append((following, done))
            held += int(size[following])
            following += 1
            continue
        while pending and (pending[0][1] <= begins[row] or held > room[row]):
            first, _ = pending.pop(0)
            held -= int(size[first])
            result[first] = row
    return result


def _needed(made: Graph, outs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first row that reads the reloaded value of each copy out, N if none."""
    reads = np.flatnonzero(made.role[made.producer[made.reads]] == Role.SWAP_IN)
    reads = reads[made.producer[made.reads[reads]] >= 0]
    first = np.full(len(made.size), len(made))  # by the original value
    np.minimum.at(first, made.content[made.reads[reads]], made.reader[reads])
    result: NDArray[np.int64] = first[
        made.content[np.array([made.read_by(int(op))[0] for op in outs], np.int64)]
    ]
    return result


def runs_of(made: Graph, graph: Graph) -> NDArray[np.int64]:
    """Return for each row the run before which the row stands, or the row's own run."""
    names = {name: op for op, name in enumerate(graph.names)}
    names |= {f"again.{name}": len(graph) + op for op, name in enumerate(graph.names)}
    runs = np.empty(len(made), np.int64)
    run = -1
    for row in range(len(made) - 1, -1, -1):
        run = names.get(made.names[row], run)
        runs[row] = run
    return runs
