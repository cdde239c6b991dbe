"""Synthetic training workloads, from a hundred to a million buffers per iteration.

A network of layers runs forward, backward and through an optimizer. Each layer keeps one activation until its
backward step, passes one gradient to the layer below, leaves one weight gradient that the next iteration
frees, and takes two temporaries in the optimizer; the remaining buffers are short temporaries at random times
of both passes. Weights and two optimizer states per layer are persistent; the states are made in the middle
of the first step. Sizes are those of float32 tensors, equal within blocks of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from traces.buffers import Buffers
from traces.trace import EventType, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike, NDArray

_NAMES = ("iteration", "parameters", "forward", "backward", "optimizer")
_BUFFERS_A_LAYER = 9  # five with a fixed role, the others short temporaries


@dataclass(frozen=True)
class _Step:
    """One iteration; its time has one unit per layer for each of forward, backward and optimizer.

    `birth` and `death` are float64[n]; a death beyond `length` is in the next iteration. `size` is int64[n],
    `weight` the bytes of each layer's weight, int64[layers].
    """

    layers: int
    birth: NDArray[np.float64]
    death: NDArray[np.float64]
    size: NDArray[np.int64]
    weight: NDArray[np.int64]

    @property
    def length(self) -> int:
        return 3 * self.layers


def generate(
    n_buffers: int, seed: int = 0, *, iterations: int = 3, replaced: float = 0.0, accesses: bool = False
) -> Trace:
    """Return a trace of whole iterations, with a mark before each iteration and at the end.

    The first iteration differs: no gradients to free, optimizer states to make. Buffers alive at the end are
    never freed.

    Args:
        n_buffers: buffers allocated in each iteration, without the persistent buffers; at least 9.
        seed: the same seed gives the same trace.
        iterations: at least 1.
        replaced: share of the weight gradients that are freed only after their successor is allocated, so
            that they live longer than an iteration.
        accesses: also record a write after each alloc and a read before each free.

    Raises:
        ValueError: too few buffers or iterations.
    """
    if iterations < 1:
        raise ValueError("needs an iteration")
    rng = np.random.default_rng(seed)
    step = _step(n_buffers, rng, replaced)
    mark = _table(EventType.MARK, [-1], 0, _NAMES.index("iteration"))
    pieces = [_table(EventType.ALLOC, np.arange(step.layers), step.weight, _NAMES.index("parameters"))]
    for table in _iterations(step, iterations):
        pieces += [mark, table]
    events = np.concatenate([*pieces, mark], axis=1)
    if accesses:
        events = _with_accesses(events)
    kind, ids, size, operation = events
    time = np.cumsum(rng.integers(200, 5000, len(kind)))
    return Trace.of(kind, ids, size, operation=operation, time_ns=time, names=_NAMES)


def buffers(n_buffers: int, seed: int = 0, *, replaced: float = 0.0) -> Buffers:
    """Return the buffers of one steady iteration on a circle of ``2 * n_buffers`` events, persistent last.

    The buffers are those of the repeating part of `generate`, without accesses and marks.

    Raises:
        ValueError: too few buffers.
    """
    step = _step(n_buffers, np.random.default_rng(seed), replaced)
    kind, row, _ = _events(step)
    at = np.arange(2 * n_buffers)
    start, end = np.empty(n_buffers, np.int64), np.empty(n_buffers, np.int64)
    start[row[kind == EventType.ALLOC]] = at[kind == EventType.ALLOC]
    end[row[kind == EventType.FREE]] = at[kind == EventType.FREE]
    end += np.where(step.death >= step.length, 2 * n_buffers, 0)
    kept = 3 * step.layers
    return Buffers.of(
        np.concatenate([start, np.zeros(kept, np.int64)]),
        np.concatenate([end, np.full(kept, 2 * n_buffers)]),
        np.concatenate([step.size, np.tile(step.weight, 3)]),
        persistent=np.arange(n_buffers + kept) >= n_buffers,
        period=2 * n_buffers,
    )


def _step(n_buffers: int, rng: np.random.Generator, replaced: float) -> _Step:
    if n_buffers < _BUFFERS_A_LAYER:
        raise ValueError(f"needs at least {_BUFFERS_A_LAYER} buffers")
    layers = n_buffers // _BUFFERS_A_LAYER
    activation, weight = _sizes(layers, rng)
    forward = np.arange(layers, dtype=np.float64)
    backward = 2 * layers - 1 - forward
    optimizer = 2 * layers + forward
    # A successor is made 0.6 into the backward step; most gradients are freed before the forward pass.
    late = rng.random(layers) < replaced
    dropped = np.where(late, backward + 0.7, forward / layers * 0.01) + 3 * layers
    temporaries = n_buffers - 5 * layers
    place = rng.integers(0, 2 * layers, temporaries)
    owner = np.where(place < layers, place, 2 * layers - 1 - place)
    begin = rng.random(temporaries) * 0.9 + 0.05
    end = begin + (0.99 - begin) * rng.random(temporaries)
    share = np.array([1, 2, 4, 4, 8])[rng.integers(0, 5, temporaries)]
    workspace = rng.integers(1, 64, temporaries) * 4
    scratch = np.where(rng.random(temporaries) < 0.25, workspace, activation[owner] // 4 * share)
    roles = [  # bytes, birth, death
        (activation, forward + 0.5, backward + 0.95),
        (activation, backward + 0.4, backward + 1.8),  # the gradient passed to the layer below
        (weight, backward + 0.6, dropped),
        (weight, optimizer + 0.2, optimizer + 0.8),
        (weight, optimizer + 0.4, optimizer + 0.6),
        (scratch, place + begin, place + end),
    ]
    size, birth, death = (np.concatenate(column) for column in zip(*roles, strict=True))
    return _Step(layers, birth, death, size, weight)


def _sizes(layers: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return bytes of each layer's activation and weight, equal for one to six successive layers."""
    block = np.repeat(np.arange(layers), rng.integers(1, 7, layers))[:layers]
    batch = 4 * int(rng.choice([8, 16, 32, 64]))
    width = 2 ** rng.integers(4, 12, layers) * rng.choice([1, 2, 3], layers)
    positions = rng.choice([1, 49, 128, 196, 512, 784], layers)
    taps = rng.choice([1, 1, 9], layers)
    activation = np.minimum(batch * width * positions, 2**28)
    weight = np.minimum(4 * width * width * taps, 2**28)
    return activation[block], weight[block]


def _events(step: _Step) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.float64]]:
    """Return event type, row of the buffer, and time of the steady iteration's allocs and frees, in order."""
    n = len(step.size)
    death = np.where(step.death >= step.length, step.death - step.length, step.death)
    time = np.concatenate([step.birth, death])
    order = np.argsort(time, kind="stable")
    kind = np.repeat(np.array([EventType.ALLOC, EventType.FREE], np.uint8), n)
    return kind[order], order % n, time[order]


def _table(kind: ArrayLike, ids: ArrayLike, size: ArrayLike, operation: ArrayLike) -> NDArray[np.int64]:
    """Return events as int64[4, n]: kind, buffer, size and operation."""
    return np.stack(np.broadcast_arrays(kind, ids, size, operation)).astype(np.int64)


def _iterations(step: _Step, iterations: int) -> Iterator[NDArray[np.int64]]:
    """Yield the events of each iteration, with ascending ids, the persistent buffers first."""
    kind, row, time = _events(step)
    n, layers = len(step.size), step.layers
    phase = np.searchsorted([layers, 2 * layers], time, side="right") + _NAMES.index("forward")
    ids = 3 * layers + row
    wraps = (kind == EventType.FREE) & (step.death[row] >= step.length)
    table = _table(kind, ids - n * wraps, np.where(kind == EventType.ALLOC, step.size[row], 0), phase)
    # Two optimizer states are made when the optimizer first reaches a layer.
    made = np.searchsorted(time, 2 * layers + np.repeat(np.arange(layers), 2) + 0.1)
    state = _table(
        EventType.ALLOC, np.arange(layers, 3 * layers), np.repeat(step.weight, 2), _NAMES.index("optimizer")
    )
    yield np.insert(table, made, state, axis=1)[:, np.insert(~wraps, made, values=True)]
    for iteration in range(1, iterations):
        later = table.copy()
        later[1] += iteration * n
        yield later


def _with_accesses(events: NDArray[np.int64]) -> NDArray[np.int64]:
    """Add a write after each alloc and a read before each free."""
    alloc, free = events[0] == EventType.ALLOC, events[0] == EventType.FREE
    count = 1 + (alloc | free)
    result = np.repeat(events, count, axis=1)
    last = np.cumsum(count) - 1
    result[0, last[alloc]], result[2, last[alloc]] = EventType.WRITE, 0
    result[0, last[free] - 1] = EventType.READ
    return result
