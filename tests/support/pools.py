"""Pools on a simulated device, and iterations with the planner looking after each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool import _core

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool import Pool


def simulated(capacity: int = 1 << 40, page: int = 4096) -> _core.SimulatedDevice:
    return _core.SimulatedDevice(
        capacity=capacity, page=page, alignment=64, shared_segment=1 << 20, large=256 << 10
    )


def run(pool: Pool, iteration: Callable[[int], None], count: int, *, marks: bool, first: int = 0) -> None:
    """So many iterations; the planner looks after each, as its thread would."""
    for number in range(first, first + count):
        if marks:
            pool.step()
        iteration(number)
        pool.plan_now()
