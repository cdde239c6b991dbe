"""Small networks as graphs: a forward pass of dear and cheap layers with skips, and its backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rewriting_graphs import graph_of

from solvers.rewriting.decide import least_limit
from solvers.rewriting.judge import simulate
from solvers.swap import Link

if TYPE_CHECKING:
    from solvers.rewriting import Graph


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
    least, _ = least_limit(graph, link)
    return graph, link, int(random.integers(least, simulate(graph, link).peak_bytes + 1))


def attention(steps: int, row: int) -> tuple[Graph, list[int]]:
    """Return additive attention over so many steps, and the values tanh(Keys + Query) of ``steps`` rows each.

    At each step: query from the state, tanh of the keys and it, scores, the next state. The gradient of each
    reads the operation's inputs or outputs, as PyTorch's do.
    """
    size, producer, reads, seconds, back = [row * steps, row], [-1, -1], list[list[int]](), list[float](), []

    def run(read: list[int], made: int, takes: float, *, backward: bool = False) -> int:
        reads.append(read)
        seconds.append(takes)
        back.append(backward)
        size.append(made)
        producer.append(len(reads) - 1)
        return len(size) - 1

    keys, state, tape, large = run([0], row * steps, 4.0 * steps), 1, list[tuple[int, ...]](), []
    for _ in range(steps):
        query = run([state], row, 1.0)
        energy = run([keys, query], row * steps, 0.01 * steps)
        score = run([energy], steps, 0.1)
        following = run([score, state, 0], row, 4.0)
        large.append(energy)
        tape.append((state, energy, score, following))
        state = following
    grad, of_keys = run([state], row, 0.1, backward=True), -1
    for state, energy, score, following in reversed(tape):
        of_score = run([grad, following, score, 0], steps, 8.0, backward=True)
        of_energy = run([of_score, energy], row * steps, 0.02 * steps, backward=True)
        more = [] if of_keys < 0 else [of_keys]
        of_keys = run([of_energy, *more], row * steps, 0.02 * steps, backward=True)
        grad = run([of_energy, grad, state], row, 2.0, backward=True)
    run([of_keys, 0], row, 8.0 * steps, backward=True)
    graph = graph_of(size, producer, reads, backward=back, seconds=seconds, lasting=np.arange(len(size)) < 2)
    return graph, large
