"""Pools on a simulated device, and iterations with a run of the planner after each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mempool import Pool, _core
from traces import Buffers
from traces.iterations.pattern import Pattern


def pattern_of(buffers: Buffers) -> Pattern:
    """Return buffers as the pattern of a single sequence."""
    n, none = len(buffers), np.zeros(0, np.int64)
    return Pattern(buffers, np.zeros(n, np.int32), {}, n, n, none, none, 0, 1.0, None)


def simulated(capacity: int = 1 << 40, page: int = 4096) -> _core.SimulatedDevice:
    return _core.SimulatedDevice(
        capacity=capacity, page=page, alignment=64, shared_segment=1 << 20, large=256 << 10
    )


def run(pool: Pool, iteration: Callable[[int], None], count: int, *, marks: bool, first: int = 0) -> None:
    """Run iterations; the planner runs after each, in place of its thread."""
    for number in range(first, first + count):
        if marks:
            pool.step()
        iteration(number)
        pool.plan_now()
