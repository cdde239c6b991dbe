"""VariantSet offsets for several variants of an iteration, any of which may follow any other."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kinds_of_iterations import kinds_of, replayed

from solvers import Plan, PlanError, Status, Stop, check, peak_load
from solvers.packing.check import check_variants
from solvers.packing.solve import solve
from solvers.packing.variants import IterationVariant, VariantSet
from traces.buffers import Buffers

if TYPE_CHECKING:
    from collections.abc import Sequence


def planned(kinds: Sequence[IterationVariant]) -> tuple[VariantSet, Plan, list[Plan]]:
    joint = VariantSet(kinds)
    plan = solve(joint.buffers, stop=Stop(nodes=10_000))
    check(plan, joint.buffers)
    assert plan.offset is not None
    plans = [
        Plan(offset, plan.arena_bytes, 0, Status.FEASIBLE, "search", 0, 0.0, "nodes", len(kind))
        for kind, offset in zip(kinds, joint.offsets(plan.offset[:, 0]), strict=True)
    ]
    return joint, plan, plans


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 4),
    deep=st.booleans(),
    alike=st.integers(0, 6),
)
def test_joint_offsets_never_overlap_in_any_succession(seed: int, count: int, deep: bool, alike: int) -> None:
    kinds = kinds_of(seed, count, deep=deep, alike=alike)
    _, plan, plans = planned(kinds)
    check_variants(kinds, plans)
    order = random.Random(seed).choices(range(count), k=40)
    assert replayed(kinds, plans, order) <= plan.arena_bytes


@given(seed=st.integers(0, 10**6), count=st.integers(1, 4))
def test_joint_load_is_reached_by_some_succession(seed: int, count: int) -> None:
    """Therefore an arena of that size is as small as any plan's."""
    kinds = kinds_of(seed, count, deep=False)
    joint, _, plans = planned(kinds)
    chance = random.Random(seed)
    orders = [[a, b, a, b, b] for a in range(count) for b in range(count)]
    orders += [chance.choices(range(count), k=60) for _ in range(4)]
    assert max(replayed(kinds, plans, order) for order in orders) == peak_load(joint.buffers)


def test_variants_with_a_common_prefix_share_its_offsets() -> None:
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


@given(seed=st.integers(0, 10**6), count=st.integers(2, 4), deep=st.booleans(), alike=st.integers(1, 6))
def test_variants_with_a_possibly_common_prefix_share_its_offsets(
    seed: int, count: int, deep: bool, alike: int
) -> None:
    """The follower cannot tell two variants apart until a size belongs to only one of them."""
    varied = []
    for number, kind in enumerate(kinds_of(seed, count, deep=deep, alike=alike)):
        size = kind.buffers.size + 64 * number
        keeps = np.zeros(len(kind), np.bool_)
        buffers = dataclasses.replace(kind.buffers, size=size, persistent=keeps)
        varied.append(dataclasses.replace(kind, buffers=buffers, least=size // 8))
    _, plan, plans = planned(varied)
    check_variants(varied, plans)
    order = random.Random(seed).choices(range(count), k=40)
    assert replayed(varied, plans, order) <= plan.arena_bytes
    short = min(alike, *(len(kind) for kind in varied))
    first = plans[0].offset
    assert first is not None
    for one in plans[1:]:
        assert one.offset is not None
        assert np.array_equal(one.offset[:short], first[:short])


def test_disjoint_size_ranges_distinguish_variants() -> None:
    n, none = 2, np.zeros((2, 2), np.int64)
    one, other = (
        IterationVariant(
            Buffers.of(np.arange(n), [2, 2], size, alignment=64, period=n), none, np.zeros(n, np.int64), least
        )
        for size, least in [([640, 64], np.array([320, 64])), ([256, 64], np.array([64, 64]))]
    )
    assert len(VariantSet([one, other]).buffers) == 4
    alike = dataclasses.replace(
        other, least=None, buffers=dataclasses.replace(one.buffers, size=np.array([500, 64]))
    )
    assert len(VariantSet([one, alike]).buffers) == 2


def test_checker_finds_an_overlap_in_any_succession() -> None:
    """Each of these plans is right for a variant that follows itself."""
    n, none = 3, np.zeros((3, 2), np.int64)
    buffers = Buffers.of(np.arange(n), [1, 2, 4], 64, alignment=64, period=n)
    late = none.copy()
    late[2] = 1  # the last one outlives the next one's first
    kinds = [
        IterationVariant(buffers, late, np.zeros(n, np.int64)),
        IterationVariant(buffers, late, np.ones(n, np.int64)),
    ]

    def plan(*offset: int) -> Plan:
        return Plan(np.array(offset)[:, None], 128, 0, Status.FEASIBLE, "search", 0, 0.0, "nodes", n)

    apart, other = plan(0, 0, 64), plan(64, 64, 0)
    for each in (apart, other):
        check(each, buffers)
    check_variants(kinds, [apart, apart])
    with pytest.raises(PlanError, match="overlap"):
        check_variants(kinds, [apart, other])
    deep = none.copy()
    deep[2] = 4  # it outlives the next iteration, by one allocation
    kinds = [
        IterationVariant(buffers, deep, np.zeros(n, np.int64)),
        IterationVariant(buffers, none, np.ones(n, np.int64)),
    ]
    keeps = Plan(
        np.array([[0, 64], [0, 64], [128, 192]]), 256, 0, Status.FEASIBLE, "search", 0, 0.0, "nodes", n
    )
    beside = dataclasses.replace(keeps, offset=np.array([[0, 64], [0, 64], [0, 64]]))
    check_variants(kinds, [keeps, beside])
    over = dataclasses.replace(keeps, offset=np.array([[128, 64], [0, 64], [0, 64]]))
    for pair in (
        [keeps, dataclasses.replace(over, offset=np.roll(np.asarray(over.offset), 1, axis=1))],
        [keeps, over],
    ):
        with pytest.raises(PlanError, match="overlap"):
            check_variants(kinds, pair)
    with pytest.raises(PlanError, match="columns"):
        check_variants(kinds, [apart, dataclasses.replace(other, offset=np.zeros((n, 2), np.int64))])
