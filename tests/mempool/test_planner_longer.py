"""Search time of plans: longer where a plan is not good yet, shorter where the program would wait."""

from __future__ import annotations

import programs
import pytest
from instances import flat

from mempool import Pool
from mempool.planning.options import OPTIONS
from traces import Buffers


def in_time(memory: programs.Watched, buffers: Buffers) -> None:
    """Allocate and free as the rows say, in the order of time; frees come first."""
    events = sorted(
        [(end, 0, row) for row, end in enumerate(buffers.end.tolist())]
        + [(start, 1, row) for row, start in enumerate(buffers.start.tolist())]
    )
    address: dict[int, int] = {}
    for _, allocates, row in events:
        if allocates:
            address[row] = memory.allocate(int(buffers.size[row]))
        else:
            memory.free(address.pop(row))


@pytest.fixture
def hard(monkeypatch: pytest.MonkeyPatch) -> Buffers:
    """An instance that a short search plans poorly and a longer search well, neither of them slow."""
    monkeypatch.setitem(vars(OPTIONS), "pool_nodes", 1_000)
    monkeypatch.setitem(vars(OPTIONS), "hard_nodes", 2_000_000)
    return flat(300, 4)


def test_hasty_plan_is_refined_once_the_program_follows(pool: Pool, hard: Buffers) -> None:
    memory = programs.Watched(pool)
    learner = pool.planner.learner
    learner.builder._patient = False
    arenas, misses = [], []
    for _ in range(60):
        pool.step()
        in_time(memory, hard)
        pool.planner.look()
        if pool.planned is not None:
            arenas.append(pool.planned.plan.arena_bytes)
            misses.append(pool.client.misses())
    soon, polished = arenas[0], arenas[-1]
    assert polished < soon
    assert arenas == [soon] * arenas.index(polished) + [polished] * arenas.count(polished)
    assert arenas.index(polished) > 4  # all had followed the first for long
    assert misses[-1] == misses[arenas.index(polished) + 1]
    assert pool.report().to_dict()["planned_arena_bytes"] == polished
    assert not learner.replanner.may_refine()
