"""Coupled packing: buffers that couple variants are placed first, then each variant's own buffers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kinds_of_iterations import kinds_of, replayed

from solvers import Plan, Status, Stop, check
from solvers.packing.coupled_variants import MOST_COUPLING, pack_coupled
from solvers.packing.solve import solve
from solvers.packing.variants import VariantSet

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.buffers import Buffers


def solved(buffers: Buffers) -> Plan:
    plan = solve(buffers, stop=Stop(nodes=2000))
    check(plan, buffers)
    return plan


def judged(joint: VariantSet, offset: NDArray[np.int64]) -> Plan:
    """Assert that a checker without variants or couplings accepts the offsets, and return the plan."""
    rows = (offset >= 0) & (joint.buffers.end > joint.buffers.start)
    arena = int((offset + joint.buffers.size)[rows].max(initial=0))
    plan = Plan(offset[:, None], arena, 0, Status.FEASIBLE, "search", 0, 0.0, "finished")
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
    kinds = kinds_of(seed, count, deep=deep, alike=alike, calm=True)
    joint = VariantSet(kinds)
    around = [(64 * 7 * k, 64 * 7 * k + 192) for k in sorted(ranges)]
    offset = pack_coupled(joint, solved, around=around)
    if offset is None:
        return
    plan = judged(joint, offset)
    rows = (offset >= 0) & (joint.buffers.end > joint.buffers.start)
    for begin, end in around:
        assert not ((offset < end) & (offset + joint.buffers.size > begin) & rows).any()
    plans = [
        Plan(each, plan.arena_bytes, 0, Status.FEASIBLE, "search", 0, 0.0, "nodes", len(kind))
        for kind, each in zip(kinds, joint.offsets(offset), strict=True)
    ]
    order = np.random.default_rng(seed).integers(0, count, 30).tolist()
    assert replayed(kinds, plans, order) <= plan.arena_bytes


def test_coupled_packing_beats_packing_all_at_once_where_few_buffers_couple() -> None:
    """Each problem has the same number of nodes."""
    parts = at_once = 0
    for seed in range(12):
        joint = VariantSet(kinds_of(seed, 3, deep=False, calm=True, long=60))
        offset = pack_coupled(joint, solved)
        assert offset is not None
        parts += judged(joint, offset).arena_bytes
        at_once += solved(joint.buffers).arena_bytes
    assert parts < at_once


def test_coupled_packing_gives_up_where_most_buffers_couple() -> None:
    crowded = VariantSet(kinds_of(5, 3, deep=False, alike=6))
    assert crowded.couples.mean() > MOST_COUPLING
    assert pack_coupled(crowded, solved) is None


def test_interrupted_search_returns_no_offsets() -> None:
    def none(buffers: Buffers) -> Plan:
        return Plan(None, 0, 0, Status.UNKNOWN, "search", 0, 0.0, "interrupt")

    assert pack_coupled(VariantSet(kinds_of(5, 3, deep=False, calm=True, long=60)), none) is None
