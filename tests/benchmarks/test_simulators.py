"""Times of each simulated allocator on the events of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from solvers.simulators import ALLOCATORS, simulate
from traces.workload import generate

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from traces.trace import Trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Return some 50,000 events with the table of births computed."""
    made = generate(1000, iterations=25)
    made.validate()
    return made


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_simulation_of_training_events(benchmark: BenchmarkFixture, trace: Trace, allocator: str) -> None:
    """Time addresses, live and reserved bytes of every event."""
    simulation = benchmark.pedantic(simulate, args=(trace, allocator), rounds=5)
    assert simulation.failed_at is None
    benchmark.extra_info["events"] = len(trace)
    benchmark.extra_info["peak_reserved_bytes"] = simulation.peak_reserved_bytes
