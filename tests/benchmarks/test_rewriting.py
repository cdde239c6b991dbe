"""How long the published rules and tuner take on a step of 10,000 operations.

``pytest tests/benchmarks/test_rewriting.py --benchmark-enable --benchmark-timer=time.process_time``
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rewriting_graphs import chain

from solvers.rewriting import erase, rewrite
from solvers.rewriting.levels import levels_of
from solvers.rewriting.published import tune
from solvers.rewriting.rules import Rules, published

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

GRAPH = chain(5_000)


def test_levels(benchmark: BenchmarkFixture) -> None:
    assert len(benchmark(levels_of, GRAPH)) > 5_000


def test_tuning_to_half_of_the_memory(benchmark: BenchmarkFixture) -> None:
    found = benchmark(lambda: tune(GRAPH, int(GRAPH.size.sum()) // 4))
    assert found.fits
    assert found.rewriting.swaps


def test_swapping_everything(benchmark: BenchmarkFixture) -> None:
    decided = published(GRAPH, levels_of(GRAPH), Rules())
    new = benchmark(lambda: rewrite(GRAPH, decided))
    assert erase(new).same_as(GRAPH)
