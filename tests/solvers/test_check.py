"""Checker of plans: equal to a count of every byte at every time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers import Plan, PlanError, Status, check
from traces.buffers import Buffers


def plan_at(offset: Any, buffers: Buffers, **claims: Any) -> Plan:
    """Return a plan with the given offsets, without a solver."""
    at = np.atleast_2d(np.asarray(offset, np.int64).T).T
    rows = ~buffers.persistent
    arena = int((at[rows] + buffers.size[rows, None]).max(initial=0))
    plan = Plan(at, arena, 0, Status.FEASIBLE, "test", 0, 0.0, "finished", buffers.period)
    return dataclasses.replace(plan, **claims)


def cells(plan: Plan, buffers: Buffers, turns: int) -> list[tuple[int, int]]:
    """Return every (time, address) that any instance uses within some iterations, with repetitions."""
    assert plan.offset is not None
    taken = []
    for i in np.flatnonzero(~buffers.persistent):
        gaps = buffers.gap_buffer == i
        idle = {
            t
            for a, b in zip(buffers.gap_start[gaps], buffers.gap_end[gaps], strict=True)
            for t in range(a, b)
        }
        times = set(range(buffers.start[i], buffers.end[i])) - idle
        for turn in range(turns):
            low = int(plan.offset[i, turn % plan.columns])
            later = turn * (buffers.period or 0)
            taken += [(t + later, low + a) for t in times for a in range(buffers.size[i])]
    return taken


def holds(plan: Plan, buffers: Buffers) -> bool:
    """Return true if no byte is used twice at one time: the definition of a valid plan."""
    assert plan.offset is not None
    turns = 1 if buffers.period is None else math.lcm(plan.columns, buffers.max_instances) + 4 * plan.columns
    taken = cells(plan, buffers, turns)
    if len(set(taken)) < len(taken):
        return False
    addresses = []
    for own in (buffers.group == 0, buffers.group == 1):
        part = dataclasses.replace(plan, offset=plan.offset[own])
        addresses.append({address for _, address in cells(part, buffers.select(own), turns)})
    return not addresses[0] & addresses[1]


@st.composite
def guesses(draw: st.DrawFn) -> tuple[Plan, Buffers]:
    """Buffers with arbitrary offsets, aligned and fixed as required."""
    buffers = draw(st.from_type(Buffers))
    columns = 1 if buffers.period is None else draw(st.integers(1, 3))
    step = draw(st.sampled_from([1, 5, 9]))
    drawn = st.lists(st.integers(0, 6), min_size=columns, max_size=columns)
    offset = np.array([draw(drawn) for _ in range(len(buffers))], np.int64).reshape(-1, columns) * step
    offset = -(-offset // buffers.alignment[:, None]) * buffers.alignment[:, None]
    offset = np.where(buffers.offset[:, None] >= 0, buffers.offset[:, None], offset)
    return plan_at(np.where(buffers.persistent[:, None], -1, offset), buffers), buffers


@given(guesses())
def test_checker_accepts_exactly_the_plans_without_a_byte_used_twice(case: tuple[Plan, Buffers]) -> None:
    plan, buffers = case
    if holds(plan, buffers):
        check(plan, buffers)
    else:
        with pytest.raises(PlanError, match=r"buffer \d+.* buffer \d+"):
            check(plan, buffers)


TWO = Buffers.of([0, 1], [2, 3], [4, 4], alignment=4, ids=["a", "b"])


@pytest.mark.parametrize(
    ("offset", "claims", "message"),
    [
        ([0, 2], {}, r"buffer 1 \(b\) at 2 is not aligned"),
        ([0, 0], {}, r"buffer 0 \(a\) at \[0, 4\) and buffer 1 \(b\) at \[0, 4\) are alive together"),
        ([0, -4], {}, "negative offset"),
        ([0, 4], {"arena_bytes": 7}, "beyond the arena of 7 bytes"),
        ([0, 4], {"lower_bound_bytes": 9}, "below its lower bound"),
        ([0, 4], {"status": Status.OPTIMAL}, "optimal arena of 8, but lower bound 0"),
        ([0, 4], {"status": Status.UNKNOWN}, "says it is unknown"),
        ([0, 4], {"offset": None, "status": Status.INFEASIBLE, "reason": "why"}, "infeasible: why"),
        ([0, 4, 8], {}, "a plan for 3 buffers, not 2"),
        ([0, 4], {"period": 5}, "period 5, not None"),
        ([[0, 0], [4, 4]], {}, "2 offsets for each"),
    ],
)
def test_each_fault_has_a_message_of_its_own(offset: list[int], claims: dict[str, Any], message: str) -> None:
    check(plan_at([0, 4], TWO), TWO)
    size = np.pad(TWO.size, (0, max(len(offset) - 2, 0)))
    arena = int((np.atleast_2d(np.asarray(offset).T).T + size[:, None]).max())
    plan = dataclasses.replace(plan_at([0, 4], TWO), offset=np.atleast_2d(np.asarray(offset).T).T)
    with pytest.raises(PlanError, match=message):
        check(dataclasses.replace(plan, **({"arena_bytes": arena} | claims)), TWO)


def test_persistent_buffer_with_an_offset_is_refused() -> None:
    buffers = Buffers.of([0], [2], 4, persistent=True)
    with pytest.raises(PlanError, match="persistent"):
        check(plan_at([8], buffers, arena_bytes=16), buffers)


def test_buffer_off_its_fixed_offset_is_refused() -> None:
    buffers = Buffers.of([0, 1], [2, 3], 4, offset=[-1, 8])
    check(plan_at([0, 8], buffers), buffers)
    with pytest.raises(PlanError, match="buffer 1 at 12 is not at its fixed offset"):
        check(plan_at([0, 12], buffers), buffers)


def test_a_single_slot_is_refused_for_a_buffer_freed_after_its_successor_is_made() -> None:
    """The old value of ``x = f(x)`` is freed once the new value exists."""
    buffers = Buffers.of([2], [13], 8, period=10)
    check(plan_at([[0, 8]], buffers), buffers)
    with pytest.raises(PlanError, match=r"buffer 0 .* buffer 0"):
        check(plan_at([[0]], buffers), buffers)
    with pytest.raises(PlanError, match=r"buffer 0 .* buffer 0"):
        check(plan_at([[0, 7]], buffers), buffers)


def test_times_at_the_ends_of_64_bits_do_not_evade_the_checker() -> None:
    far = 2**62
    line = Buffers.of([0, 0, far - 1], [far, far, far], 4)
    with pytest.raises(PlanError, match=r"buffer 0 .* buffer 1 "):
        check(plan_at([0, 0, 4], line), line)
    circle = Buffers.of([far - 2, 0], [far, 1], 4, period=far - 1)
    with pytest.raises(PlanError, match=r"buffer 0 .* buffer 1 "):
        check(plan_at([0, 0], circle), circle)
    check(plan_at([0, 4], circle), circle)
    long = Buffers.of([0], [far], 1, period=1)
    with pytest.raises(PlanError, match="lives 4611686018427387904 periods"):
        check(plan_at([0], long), long)
