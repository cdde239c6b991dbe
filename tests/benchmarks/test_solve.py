"""How fast training-shaped buffers are planned and checked, and how near the lower bound the plans come."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from solvers import Stop, check, solve
from traces import workload
from traces.buffers import Buffers

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

BENCH = Path(__file__).parents[3] / "shared" / "bench" / "minimalloc"


@pytest.mark.parametrize("n", [1_000, 4_000, 100_000])
def test_quick_orders_plan_a_training_iteration(benchmark: BenchmarkFixture, n: int) -> None:
    buffers = workload.buffers(n, 0)
    plan = benchmark(lambda: solve(buffers, solver="greedy", stop=Stop(nodes=0)))
    check(plan, buffers)
    benchmark.extra_info["gap"] = plan.gap
    assert plan.gap < 0.01


@pytest.mark.parametrize("n", [4_000, 100_000])
def test_a_plan_is_checked(benchmark: BenchmarkFixture, n: int) -> None:
    buffers = workload.buffers(n, 0)
    plan = solve(buffers, solver="greedy", stop=Stop(nodes=0))
    benchmark(lambda: check(plan, buffers))


@pytest.mark.skipif(not BENCH.is_dir(), reason="the public instances are not beside this repository")
@pytest.mark.parametrize("name", list("ABCDEF"))
def test_public_instances_within_the_default_budget(benchmark: BenchmarkFixture, name: str) -> None:
    table = np.loadtxt(BENCH / f"{name}.1048576.csv", np.int64, delimiter=",", skiprows=1)
    buffers = Buffers.of(table[:, 1], table[:, 2], table[:, 3])
    plan = benchmark.pedantic(lambda: solve(buffers, solver="greedy"), rounds=1)
    check(plan, buffers)
    benchmark.extra_info["gap"] = plan.gap
