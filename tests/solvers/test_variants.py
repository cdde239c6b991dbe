"""Joint offsets for iteration variants, any of which may follow any other."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from random_variants import random_variants, replayed_peak

from solvers import Plan, PlanError, Status, Stop, check, peak_load
from solvers.packing.check import check_variants
from solvers.packing.solve import solve
from solvers.packing.variants import IterationVariant, VariantSet, pack_coupled
from traces.buffers import Buffers


def planned(variants: Sequence[IterationVariant]) -> tuple[VariantSet, Plan, list[Plan]]:
    joint = VariantSet(variants)
    plan = solve(joint.buffers, stop=Stop(nodes=10_000))
    check(plan, joint.buffers)
    assert plan.offset is not None
    plans = [
        Plan(offset, plan.arena_bytes, 0, Status.FEASIBLE, "auto", 0, 0.0, "nodes", len(variant))
        for variant, offset in zip(variants, joint.offsets(plan.offset[:, 0]), strict=True)
    ]
    return joint, plan, plans


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 4),
    deep=st.booleans(),
    alike=st.integers(0, 6),
)
def test_joint_offsets_never_overlap_in_any_succession(seed: int, count: int, deep: bool, alike: int) -> None:
    variants = random_variants(seed, count, deep=deep, alike=alike)
    _, plan, plans = planned(variants)
    check_variants(variants, plans)
    order = random.Random(seed).choices(range(count), k=40)
    assert replayed_peak(variants, plans, order) <= plan.arena_bytes


@given(seed=st.integers(0, 10**6), count=st.integers(1, 4))
def test_joint_load_is_reached_by_some_succession(seed: int, count: int) -> None:
    """Therefore an arena of that size is as small as any plan's."""
    variants = random_variants(seed, count, deep=False)
    joint, _, plans = planned(variants)
    chance = random.Random(seed)
    orders = [[a, b, a, b, b] for a in range(count) for b in range(count)]
    orders += [chance.choices(range(count), k=60) for _ in range(4)]
    assert max(replayed_peak(variants, plans, order) for order in orders) == peak_load(joint.buffers)


@given(seed=st.integers(0, 10**6), count=st.integers(2, 4), deep=st.booleans(), alike=st.integers(1, 6))
def test_variants_with_a_possibly_common_prefix_share_its_offsets(
    seed: int, count: int, deep: bool, alike: int
) -> None:
    """The follower cannot tell two variants apart until a size belongs to only one of them."""
    varied = []
    for number, variant in enumerate(random_variants(seed, count, deep=deep, alike=alike)):
        size = variant.buffers.size + 64 * number
        keeps = np.zeros(len(variant), np.bool_)
        buffers = dataclasses.replace(variant.buffers, size=size, persistent=keeps)
        varied.append(dataclasses.replace(variant, buffers=buffers, least=size // 8))
    _, plan, plans = planned(varied)
    check_variants(varied, plans)
    order = random.Random(seed).choices(range(count), k=40)
    assert replayed_peak(varied, plans, order) <= plan.arena_bytes
    short = min(alike, *(len(variant) for variant in varied))
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
    variants = [
        IterationVariant(buffers, late, np.zeros(n, np.int64)),
        IterationVariant(buffers, late, np.ones(n, np.int64)),
    ]

    def plan(*offset: int) -> Plan:
        return Plan(np.array(offset)[:, None], 128, 0, Status.FEASIBLE, "auto", 0, 0.0, "nodes", n)

    apart, other = plan(0, 0, 64), plan(64, 64, 0)
    for each in (apart, other):
        check(each, buffers)
    check_variants(variants, [apart, apart])
    with pytest.raises(PlanError, match="overlap"):
        check_variants(variants, [apart, other])
    deep = none.copy()
    deep[2] = 4  # it outlives the next iteration, by one allocation
    variants = [
        IterationVariant(buffers, deep, np.zeros(n, np.int64)),
        IterationVariant(buffers, none, np.ones(n, np.int64)),
    ]
    keeps = Plan(
        np.array([[0, 64], [0, 64], [128, 192]]), 256, 0, Status.FEASIBLE, "auto", 0, 0.0, "nodes", n
    )
    beside = dataclasses.replace(keeps, offset=np.array([[0, 64], [0, 64], [0, 64]]))
    check_variants(variants, [keeps, beside])
    over = dataclasses.replace(keeps, offset=np.array([[128, 64], [0, 64], [0, 64]]))
    for pair in (
        [keeps, dataclasses.replace(over, offset=np.roll(np.asarray(over.offset), 1, axis=1))],
        [keeps, over],
    ):
        with pytest.raises(PlanError, match="overlap"):
            check_variants(variants, pair)
    with pytest.raises(PlanError, match="columns"):
        check_variants(variants, [apart, dataclasses.replace(other, offset=np.zeros((n, 2), np.int64))])


def solved(buffers: Buffers) -> Plan:
    plan = solve(buffers, stop=Stop(nodes=2000))
    check(plan, buffers)
    return plan


def judged(joint: VariantSet, offset: NDArray[np.int64]) -> Plan:
    """Assert that a checker without variants or couplings accepts the offsets, and return the plan."""
    rows = (offset >= 0) & (joint.buffers.end > joint.buffers.start)
    arena = int((offset + joint.buffers.size)[rows].max(initial=0))
    plan = Plan(offset[:, None], arena, 0, Status.FEASIBLE, "auto", 0, 0.0, "finished")
    placed = dataclasses.replace(
        joint.buffers, size=np.where(rows, joint.buffers.size, 0), alignment=np.ones(len(offset), np.int64)
    )
    check(plan, placed)
    assert (offset[rows] % joint.buffers.alignment[rows] == 0).all()
    return plan


@given(
    seed=st.integers(0, 10**6), count=st.integers(2, 4), deep=st.booleans(), alike=st.integers(0, 3),
    ranges=st.lists(st.integers(0, 30), max_size=3, unique=True),
)  # fmt: skip
def test_coupled_offsets_are_disjoint_and_avoid_taken_ranges(
    seed: int, count: int, deep: bool, alike: int, ranges: list[int]
) -> None:
    variants = random_variants(seed, count, deep=deep, alike=alike, calm=True)
    joint = VariantSet(variants)
    around = [(64 * 7 * k, 64 * 7 * k + 192) for k in sorted(ranges)]
    offset = pack_coupled(joint, solved, around=around)
    if offset is None:
        return
    plan = judged(joint, offset)
    rows = (offset >= 0) & (joint.buffers.end > joint.buffers.start)
    for begin, end in around:
        assert not ((offset < end) & (offset + joint.buffers.size > begin) & rows).any()
    plans = [
        Plan(each, plan.arena_bytes, 0, Status.FEASIBLE, "auto", 0, 0.0, "nodes", len(variant))
        for variant, each in zip(variants, joint.offsets(offset), strict=True)
    ]
    order = np.random.default_rng(seed).integers(0, count, 30).tolist()
    assert replayed_peak(variants, plans, order) <= plan.arena_bytes


def test_interrupted_search_returns_no_offsets() -> None:
    def none(buffers: Buffers) -> Plan:
        return Plan(None, 0, 0, Status.UNKNOWN, "auto", 0, 0.0, "interrupt")

    assert pack_coupled(VariantSet(random_variants(5, 3, deep=False, calm=True, long=60)), none) is None
