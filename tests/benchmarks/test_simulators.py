"""How fast the events of a training go through each simulated allocator."""

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
    """Some 50,000 events; the table of births is made once."""
    made = generate(1000, iterations=25)
    made.validate()
    return made


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_simulate(benchmark: BenchmarkFixture, trace: Trace, allocator: str) -> None:
    """Addresses, live and reserved bytes of every event."""
    simulation = benchmark.pedantic(simulate, args=(trace, allocator), rounds=5)
    assert simulation.failed_at is None
    benchmark.extra_info["events"] = len(trace)
    benchmark.extra_info["peak_reserved_bytes"] = simulation.peak_reserved_bytes
