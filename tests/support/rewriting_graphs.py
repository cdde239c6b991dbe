"""Graphs of steps for the tests of rewriting."""

from __future__ import annotations

from typing import Any

import numpy as np

from solvers.rewriting import Graph


def graph_of(
    size: list[int],
    producer: list[int],
    reads: list[list[int]],
    *,
    backward: list[bool] | None = None,
    **columns: Any,
) -> Graph:
    """A graph by its values' sizes and producers and what each operation reads; other columns by name."""
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
    """A batch through ``depth`` layers and back, each layer's output read again by its gradient.

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
