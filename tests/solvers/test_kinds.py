"""Offsets for iterations of several kinds, any of which may follow any other."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers import Plan, PlanError, Status, Stop, check, peak_load
from solvers.check import check_kinds
from solvers.kinds import Joint, Kind
from solvers.solve import solve
from traces.buffers import Buffers

if TYPE_CHECKING:
    from collections.abc import Sequence


def kinds_of(seed: int, count: int, *, deep: bool, alike: int = 0) -> list[Kind]:
    """At random; ``alike``: so many allocations at the beginning are the same in all."""
    rng = np.random.default_rng(seed)
    beginning = rng.integers(1, 40, alike) * 64
    kinds = []
    lengths = rng.integers(1, 14, count)
    for n in lengths.tolist():
        end = np.arange(n) + rng.integers(1, max(n // 2, 2), n)
        size = rng.integers(1, 40, n) * 64
        size[: min(alike, n)] = beginning[: min(alike, n)]
        reach = rng.integers(0, lengths + 1, (n, count))
        if deep:
            reach += (rng.random((n, count)) < 0.1) * rng.integers(0, lengths.min() + 1, (n, count))
        outlives = (end >= n) | (rng.random(n) < 0.2)
        reach = np.where(outlives[:, None], reach, 0)
        end = np.where(outlives, n + 1, end)
        persistent = rng.random(n) < 0.1
        buffers = Buffers.of(np.arange(n), end, size, alignment=64, persistent=persistent, period=n)
        kinds.append(Kind(buffers, reach, np.zeros(n, np.int64)))
    return kinds


def planned(kinds: Sequence[Kind]) -> tuple[Joint, Plan, list[Plan]]:
    joint = Joint(kinds)
    plan = solve(joint.buffers, stop=Stop(nodes=10_000))
    check(plan, joint.buffers)
    assert plan.offset is not None
    plans = [
        Plan(offset, plan.arena_bytes, 0, Status.FEASIBLE, "search", 0, 0.0, "nodes", len(kind))
        for kind, offset in zip(kinds, joint.offsets(plan.offset[:, 0]), strict=True)
    ]
    return joint, plan, plans


def replayed(kinds: Sequence[Kind], plans: Sequence[Plan], order: Sequence[int]) -> int:
    """The most bytes alive at once in this succession, in which no two live buffers may overlap."""
    live: dict[tuple[int, int], tuple[int, int, int]] = {}  # (iteration, row) -> begin, end, when it is freed
    most = 0
    begins = np.append(0, np.cumsum([len(kinds[k]) for k in order]))
    for iteration, (k, follower) in enumerate(zip(order, [*order[1:], order[-1]], strict=True)):
        kind, offset = kinds[k], plans[k].offset
        assert offset is not None
        for row in range(len(kind)):
            now = int(begins[iteration]) + row
            live = {key: value for key, value in live.items() if value[2] > now}
            if kind.buffers.persistent[row]:
                continue
            over = int(begins[iteration]) + min(int(kind.buffers.end[row]), len(kind))
            if kind.reach[row].any():
                over = int(begins[iteration + 1]) + int(kind.reach[row, follower])
            if over <= now:
                continue
            begin = int(offset[row, iteration % plans[k].columns])
            end = begin + int(kind.buffers.size[row])
            for other, (low, high, _) in live.items():
                assert end <= low or high <= begin, f"{iteration}:{row} overlaps {other}"
            live[iteration, row] = begin, end, over
            most = max(most, sum(high - low for low, high, _ in live.values()))
    return most


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 4),
    deep=st.booleans(),
    alike=st.integers(0, 6),
)
def test_in_any_succession_nothing_overlaps(seed: int, count: int, deep: bool, alike: int) -> None:
    kinds = kinds_of(seed, count, deep=deep, alike=alike)
    _, plan, plans = planned(kinds)
    check_kinds(kinds, plans)
    order = random.Random(seed).choices(range(count), k=40)
    assert replayed(kinds, plans, order) <= plan.arena_bytes


@given(seed=st.integers(0, 10**6), count=st.integers(1, 4))
def test_the_load_is_that_of_some_succession(seed: int, count: int) -> None:
    """So an arena as large as it is no larger than any plan's must be."""
    kinds = kinds_of(seed, count, deep=False)
    joint, _, plans = planned(kinds)
    chance = random.Random(seed)
    orders = [[a, b, a, b, b] for a in range(count) for b in range(count)]
    orders += [chance.choices(range(count), k=60) for _ in range(4)]
    assert max(replayed(kinds, plans, order) for order in orders) == peak_load(joint.buffers)


def test_what_begins_alike_lies_alike() -> None:
    kinds = kinds_of(3, 3, deep=False, alike=5)
    joint, _, plans = planned(kinds)
    short = min(5, *(len(kind) for kind in kinds))
    offsets = [plan.offset for plan in plans]
    shared = [np.where(kind.buffers.persistent[:short], -1, 0) for kind in kinds]
    for offset, keeps in zip(offsets, shared, strict=True):
        assert offset is not None
        assert offset.shape[1] == joint.columns
        same = (keeps == 0) & (shared[0] == 0)
        assert offsets[0] is not None
        assert np.array_equal(offset[:short][same], offsets[0][:short][same])
    assert short >= 2


def test_the_judge_finds_what_overlaps_in_some_succession() -> None:
    """Each of these plans is right for a kind that follows itself."""
    n, none = 3, np.zeros((3, 2), np.int64)
    buffers = Buffers.of(np.arange(n), [1, 2, 4], 64, alignment=64, period=n)
    late = none.copy()
    late[2] = 1  # the last one outlives the next one's first
    kinds = [Kind(buffers, late, np.zeros(n, np.int64)), Kind(buffers, late, np.ones(n, np.int64))]

    def plan(*offset: int) -> Plan:
        return Plan(np.array(offset)[:, None], 128, 0, Status.FEASIBLE, "search", 0, 0.0, "nodes", n)

    apart, other = plan(0, 0, 64), plan(64, 64, 0)
    for each in (apart, other):
        check(each, buffers)
    check_kinds(kinds, [apart, apart])
    with pytest.raises(PlanError, match="overlap"):
        check_kinds(kinds, [apart, other])
    with pytest.raises(PlanError, match="columns"):
        check_kinds(kinds, [apart, dataclasses.replace(other, offset=np.zeros((n, 2), np.int64))])
