"""Small networks as graphs: a forward pass of dear and cheap layers with skips, and its backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rewriting_graphs import graph_of

if TYPE_CHECKING:
    from solvers.rewriting import Graph


def small_net(seed: int, *, most: int = 6) -> Graph:
    """Sizes of 1 to 8 bytes, seconds of quarters; gradients read some of what their layers read and made."""
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
