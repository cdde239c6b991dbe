"""The core evicts plans; the planner's registry knows the plans that the core knows, and a log says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from pools import simulated

from mempool import Pool
from mempool.planning.registry import MOST_KNOWN


def allocations(variant: int) -> int:
    return 10 + 3 * variant


def run(pool: Pool, variant: int) -> int:
    """Run one iteration of a variant; return its hits."""
    before = pool.client.stats()["outcomes"]["hit"]
    for address in [pool.allocate(10_000 * (variant + 3) + 640 * k) for k in range(allocations(variant))]:
        pool.free(address)
    pool.step()
    pool.plan_now()
    return int(pool.client.stats()["outcomes"]["hit"]) - before


def lengths_known(pool: Pool) -> set[int]:
    """Return the iteration lengths that the planner's registry has plans of."""
    return {len(planned.buffers) for planned in pool.planner.learner.registry}


@pytest.fixture
def pool_with_many_variants() -> Pool:
    pool = Pool(simulated(), background=False)
    pool.require_step_marks()
    for variant in range(MOST_KNOWN):
        for _ in range(8):
            run(pool, variant)
    return pool


def test_registry_has_the_plans_that_the_core_has(pool_with_many_variants: Pool) -> None:
    with pool_with_many_variants as pool:
        for variant in (MOST_KNOWN, MOST_KNOWN + 1):
            for _ in range(8):
                run(pool, variant)
            assert len(pool.planner.learner.registry) == len(pool.client.patterns()) == MOST_KNOWN
            assert pool.planner.learner.registry.latest in list(pool.planner.learner.registry)


def test_evicted_variant_is_planned_again(pool_with_many_variants: Pool) -> None:
    """The core evicts the variant used least recently, whichever was planned first."""
    with pool_with_many_variants as pool:
        for _ in range(5):
            for variant in reversed(range(MOST_KNOWN)):
                run(pool, variant)
        for _ in range(40):
            for variant in [*range(8), MOST_KNOWN]:
                run(pool, variant)
        evicted = [v for v in range(MOST_KNOWN) if allocations(v) not in lengths_known(pool)]
        assert evicted == [MOST_KNOWN - 1]
        assert [entry["decision"] for entry in pool.client.decisions()].count("evicted") == 1
        hits = [run(pool, MOST_KNOWN - 1) for _ in range(40)]
        assert hits[-3:] == [allocations(MOST_KNOWN - 1)] * 3


def test_saved_plans_leave_out_a_loaded_plan_that_nothing_followed(tmp_path: Path) -> None:
    first, second = str(tmp_path / "first.plan"), str(tmp_path / "second.plan")
    for variant, loaded, written in ((1, None, first), (2, first, second)):
        with Pool(simulated(), background=False, plan=loaded) as pool:
            for _ in range(8):
                run(pool, variant)
            pool.save(written)
    with Pool(simulated(), background=False, plan=second) as pool:
        assert lengths_known(pool) == {allocations(2)}


def test_explanation_tells_decisions_in_order(tmp_path: Path) -> None:
    file = str(tmp_path / "run.plan")
    with Pool(simulated(), background=False) as pool:
        for _ in range(8):
            run(pool, 1)
        pool.save(file)
        decisions = [entry["decision"] for entry in pool.client.decisions()]
        assert decisions == ["recording", "period", "planned", "arena"]
        assert "found 13 allocations that recur" in pool.explain()
    for variant, expected in ((1, "the program follows the loaded plans"), (2, "set the loaded plans aside")):
        with Pool(simulated(), background=False, plan=file) as pool:
            for _ in range(8):
                run(pool, variant)
            assert expected in pool.explain()
