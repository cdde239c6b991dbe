"""Search time of plans: longer where a plan is not good yet, shorter where the program would wait."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import programs
import pytest
from instances import flat
from pools import pattern_of

import solvers
from mempool import Pool
from mempool.planning.options import OPTIONS
from mempool.planning.planned_pattern import PlannedPattern, make_plan
from traces import Buffers


@pytest.mark.parametrize(("streams", "patient"), [(1, True), (2, True), (1, False)])
def test_patient_planner_searches_longer_for_a_poor_plan(streams: int, patient: bool) -> None:
    """With shared streams the best plan exceeds the bound for a reason, so the search stays short."""
    hard = flat(1000, 3)
    hard = dataclasses.replace(hard, stream=np.arange(len(hard)) % streams)
    planned = make_plan(pattern_of(hard), alignment=64, wait_bytes=1, patient=patient)
    assert planned is not None
    longer = patient and streams == 1
    assert (planned.plan.nodes > 5 * OPTIONS.pool_nodes) == longer
    if longer:
        buffers = dataclasses.replace(hard, alignment=np.full(len(hard), 64))
        soon = solvers.solve(buffers, stop=solvers.Stop(nodes=OPTIONS.pool_nodes), solver="search")
        assert soon.arena_bytes > OPTIONS.good * soon.lower_bound_bytes
        assert planned.plan.arena_bytes < soon.arena_bytes


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
            misses.append(learner.builder.counts().misses)
    soon, polished = arenas[0], arenas[-1]
    assert polished < soon
    assert arenas == [soon] * arenas.index(polished) + [polished] * arenas.count(polished)
    assert arenas.index(polished) > 4  # all had followed the first for long
    assert misses[-1] == misses[arenas.index(polished) + 1]
    assert pool.report().to_dict()["planned_arena_bytes"] == polished
    assert not learner.replanner.may_refine()


def test_refinement_gives_way_to_a_program_off_its_plan(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variant after every fifty steps is learned first, however long the refinement would take."""
    monkeypatch.setattr(PlannedPattern, "is_hard", lambda *_, **__: True)
    memory, learner = programs.Watched(pool), pool.planner.learner
    learner.builder._patient = False
    plan, searched, changes = make_plan, list[int](), True  # in iterations, each time

    def iteration(number: int) -> None:
        pool.step()
        programs.layers(memory, count=5)
        if changes and number % 50 == 49:
            programs.layers(memory, count=3, scale=8192)

    def beside_the_program(*args: Any, interrupt: Callable[[], bool], patient: bool, **options: Any) -> Any:
        done = 0
        while patient and done < 100 and not interrupt():
            iteration(done)
            done += 1
        searched.extend([done] if patient else [])
        return plan(*args, patient=False, **options)

    monkeypatch.setattr("mempool.planning.planned_pattern.make_plan", beside_the_program)
    for number in range(500):
        iteration(number % 40)  # nothing else comes yet
        pool.planner.look()
        if searched:
            break
    assert searched == [50]
    assert pool.client.state()["recording"]
    changes = False
    for number in range(1000):
        iteration(number)
        pool.planner.look()
    assert searched[1:] == [100]
    assert not learner.builder.metadata.hard
