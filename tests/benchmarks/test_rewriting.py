"""Time of the distance rule and of the published tuner on a step of 10,000 operations.

``pytest tests/benchmarks/test_rewriting.py --benchmark-enable --benchmark-timer=time.process_time``
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from published_rules import tune
from rewriting_graphs import chain, reverted

from solvers.rewriting import apply_rewriting
from solvers.rewriting.distance_rule import levels_of, offload_beyond

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

GRAPH = chain(5_000)


def test_levels(benchmark: BenchmarkFixture) -> None:
    assert benchmark(levels_of, GRAPH).level.max() >= 5_000


def test_tuning_to_half_of_the_memory(benchmark: BenchmarkFixture) -> None:
    found = benchmark(lambda: tune(GRAPH, int(GRAPH.size.sum()) // 4))
    assert found.fits
    assert found.rewriting.offloads


def test_offloading_everything(benchmark: BenchmarkFixture) -> None:
    decided = offload_beyond(GRAPH, 1)
    new = benchmark(lambda: apply_rewriting(GRAPH, decided))
    assert reverted(new).same_as(GRAPH)
