"""Proofs of optimality for small packing problems of each problem class, with times.

``pytest tests/benchmarks/test_proofs.py --benchmark-enable`` takes 50 problems of each class, up to 0.1 s
each; with ``-m full`` there are 1,000, up to 10 s each, with and without OR-Tools.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from instances import GENERATORS

from solvers import Plan, Status, Stop, check, solve

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_benchmark.fixture import BenchmarkFixture

    from traces import Buffers

SOON = 0.1  # seconds
#: Number of problems proven with few nodes, among the first 20 of each class.
PROVEN = {"loose": 20, "tight": 20, "aligned": 19, "circular": 20, "pinned": 20}


@dataclass(frozen=True)
class Solved:
    """One problem: `GENERATORS[name](n, seed)`."""

    n: int
    seed: int
    seconds: float
    plan: Plan

    @property
    def proven(self) -> bool:
        return self.plan.status is Status.OPTIMAL

    def __str__(self) -> str:
        arena, bound = self.plan.arena_bytes, self.plan.lower_bound_bytes
        return f"n {self.n} seed {self.seed}: arena {arena}, bound {bound}, {self.seconds:.3f} s"


def problem(name: str, seed: int) -> Buffers:
    """Return a problem of 2 to 30 buffers."""
    return GENERATORS[name](int(np.random.default_rng([seed, 7]).integers(2, 31)), seed)


def solved(name: str, seeds: Iterable[int], stop: Stop) -> list[Solved]:
    rows = []
    for seed in seeds:
        buffers = problem(name, seed)
        begin = time.perf_counter()
        plan = solve(buffers, stop=stop)
        rows.append(Solved(len(buffers), seed, time.perf_counter() - begin, plan))
        check(plan, buffers)
    return rows


def shares(rows: list[Solved]) -> dict[str, float]:
    return {
        "proven": sum(row.proven for row in rows) / len(rows),
        f"proven in {SOON} s": sum(row.proven and row.seconds <= SOON for row in rows) / len(rows),
        "worst seconds": max(row.seconds for row in rows),
    }


@pytest.mark.parametrize("name", GENERATORS)
def test_small_problems_are_proven_optimal_soon(benchmark: BenchmarkFixture, name: str) -> None:
    rows = benchmark.pedantic(lambda: solved(name, range(50), Stop(seconds=SOON)), rounds=1)
    benchmark.extra_info.update(shares(rows))


@pytest.mark.parametrize("name", GENERATORS)
def test_few_nodes_are_enough_to_prove_most_small_problems(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("solvers.packing.exact.available", lambda: False)
    rows = solved(name, range(20), Stop(nodes=10_000_000))
    assert sum(row.proven for row in rows) >= PROVEN[name]


@pytest.mark.full
@pytest.mark.timeout(0)
@pytest.mark.parametrize("ortools", [True, False], ids=["ortools", "alone"])
@pytest.mark.parametrize("name", GENERATORS)
def test_a_thousand_small_problems_are_proven_optimal(
    name: str, ortools: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if ortools:
        solve(problem(name, 0), solver="exact")  # imports it
    else:
        monkeypatch.setattr("solvers.packing.exact.available", lambda: False)
    rows = solved(name, range(1000), Stop(seconds=10))
    late = [row for row in rows if not row.proven or row.seconds > SOON]
    figures = ", ".join(f"{key} {value:.3f}" for key, value in shares(rows).items())
    with capsys.disabled():
        print(f"\n{name} {'with' if ortools else 'without'} OR-Tools: {figures}", *late, sep="\n  ")
