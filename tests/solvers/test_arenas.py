"""Several arenas, and streams that share one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from instances import crossing, fits

from solvers import Plan, PlanError, Status, Stop, check, lower_bound, peak_load, solve
from solvers.packing.options import OPTIONS
from solvers.packing.plan import MOST_ARENAS, stride_of
from solvers.packing.streams import NEVER, solve_streams, waits
from traces.buffers import Buffers

FAST = Stop(nodes=20_000)
CAPACITIES = st.lists(st.integers(1, 14), min_size=2, max_size=3).map(tuple)


def few(buffers: Buffers) -> Buffers:
    """Select a few buffers, all of the same group."""
    some = buffers.select(np.arange(min(len(buffers), 4 if buffers.max_instances == 1 else 2)))
    return dataclasses.replace(some, group=np.zeros(len(some), np.int64))


@pytest.mark.parametrize("filling", [True, False])
@given(buffers=st.from_type(Buffers), capacities=CAPACITIES)
@example(buffers=Buffers.of([0, 0, 0], [1, 1, 1], [3, 3, 1], alignment=[4, 4, 1]), capacities=(3, 4))
@example(buffers=Buffers.of([0, 0], [1, 1], [3, 3], alignment=4), capacities=(3, 3))
@example(buffers=Buffers.of([0, 0], [1, 1], [3, 3], alignment=32), capacities=(3, 4))
@example(buffers=Buffers.of([0], [1], [3], alignment=32, offset=8), capacities=(3, 4))
@example(buffers=Buffers.of([0], [1], [4], offset=1), capacities=(5, 5))
def test_solver_finds_a_plan_exactly_where_brute_force_does(
    monkeypatch: pytest.MonkeyPatch, filling: bool, buffers: Buffers, capacities: tuple[int, ...]
) -> None:
    """Also where the search between walls does all the work."""
    if not filling:
        options = dataclasses.replace(OPTIONS, fillings=0)
        monkeypatch.setattr("solvers.packing.arenas.OPTIONS", options)
    buffers = few(buffers)
    there = fits(buffers, *capacities)
    plan = solve(buffers, capacity=capacities, solver="exact", columns=buffers.max_instances)
    assert (plan.offset is not None) == there
    assert there or plan.status is Status.INFEASIBLE
    quick = solve(buffers, capacity=capacities, stop=FAST, columns=buffers.max_instances)
    assert there or quick.offset is None
    assert not there or quick.status is not Status.INFEASIBLE
    for found in (plan, quick):
        if found.offset is not None:
            check(found, buffers)
    if len(buffers.gap_buffer) == 0 and buffers.period is None:  # one piece each: the search is complete
        assert quick.status is not Status.UNKNOWN


@pytest.mark.parametrize("solver", ["auto", "greedy"])
@given(buffers=st.from_type(Buffers), capacities=CAPACITIES, seed=st.integers(0, 3))
def test_every_plan_lies_within_the_arenas(
    solver: str, buffers: Buffers, capacities: tuple[int, ...], seed: int
) -> None:
    better = list[Plan]()
    plan = solve(
        buffers,
        capacity=capacities,
        solver=solver,
        seed=seed,
        stop=FAST,
        on_improvement=better.append,
    )
    if plan.offset is None:
        assert plan.status in (Status.INFEASIBLE, Status.UNKNOWN)
        assert plan.reason
        assert not better
        return
    assert plan.arenas == capacities
    for each in (plan, *better):
        check(each, buffers)
    arena, offset = plan.in_arenas()
    assert arena.dtype == np.int16
    assert ((arena < 0) == buffers.persistent[:, None]).all()
    assert (offset + arena * stride_of(capacities))[arena >= 0].tolist() == plan.offset[arena >= 0].tolist()
    assert plan.lower_bound_bytes >= peak_load(buffers)
    assert (plan.stopped_by == "bound") == (plan.status is Status.OPTIMAL)


@pytest.mark.parametrize(
    ("size", "capacities", "says"),
    [
        ([3, 3, 2], (3, 4), "a load of 8 bytes > 7 usable in all arenas"),
        ([6, 6, 1], (8, 5), "a load of buffers larger than 5 bytes of 12 bytes > 8 usable in larger arenas"),
        ([4, 3, 3], (5, 5), "a search found none"),
    ],
)
def test_infeasible_capacities_are_proven(size: list[int], capacities: tuple[int, ...], says: str) -> None:
    plan = solve(Buffers.of([0, 0, 0], [2, 2, 2], size), capacity=capacities)
    assert (plan.status, plan.reason) == (Status.INFEASIBLE, says)
    assert plan.stopped_by == ("proof" if says == "a search found none" else "bound")


def many(n: int, *, period: int | None = None) -> Buffers:
    rng = np.random.default_rng(3)
    start = rng.integers(0, n, n)
    length = rng.integers(1, n // 10, n)
    return Buffers.of(start, start + length, rng.integers(1, 64, n) * 512, alignment=512, period=period)


@pytest.mark.parametrize("period", [None, 20_000])
@pytest.mark.parametrize("parts", [(0.7, 0.33), (0.33, 0.7), (0.26, 0.26, 0.26, 0.26)])
def test_many_buffers_fit_where_a_little_is_to_spare(parts: tuple[float, ...], period: int | None) -> None:
    buffers = many(20_000, period=period)
    capacities = tuple(int(part * peak_load(buffers)) for part in parts)
    plan = solve(buffers, capacity=capacities, stop=Stop(nodes=1))
    check(plan, buffers)
    assert len(np.unique(plan.in_arenas()[0])) == len(parts)


@pytest.mark.parametrize("offset", [5, 16 + 7, 320])
def test_fixed_offset_outside_all_arenas_is_infeasible(offset: int) -> None:
    plan = solve(Buffers.of([0], [1], [6], offset=offset, ids=["a"]), capacity=(9, 12))
    assert plan.status is Status.INFEASIBLE
    assert plan.reason == "the fixed offset of buffer 0 (a) is not within one arena"


@pytest.mark.parametrize(
    ("capacity", "says"),
    [
        ((), "0 arenas"),
        ([4, 0], "an arena of 0 bytes"),
        ((4, -1), "an arena of -1 bytes"),
        ((0,), "an arena of 0 bytes"),
        ((1,) * (MOST_ARENAS + 1), "257 arenas"),
        ((1 << 59, 1), "more than there are addresses"),
    ],
)
def test_invalid_capacities_are_refused(capacity: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        solve(Buffers.of([0], [1], [1]), capacity=capacity)


def test_solvers_for_a_single_arena_refuse_several() -> None:
    with pytest.raises(ValueError, match="solver 'first_fit' has one arena; for several there are auto"):
        solve(Buffers.of([0], [1], [1]), capacity=(1, 1), solver="first_fit")


TWO = Buffers.of([0, 0, 1], [2, 2, 3], [5, 4, 4], alignment=[4, 4, 1])


def lying(offset: list[int], **claims: Any) -> Plan:
    plan = solve(TWO, capacity=(9, 10))
    assert plan.arena_bytes == 13
    return dataclasses.replace(plan, offset=np.array(offset)[:, None], **claims)


def test_checker_accepts_plans_within_the_arenas() -> None:
    check(lying([0, 16, 20]), TWO)
    check(lying([0, 16, 5], status="feasible", arena_bytes=14, lower_bound_bytes=13), TWO)


@pytest.mark.parametrize(
    ("offset", "claims", "says"),
    [
        ([8, 0, 16], {}, "buffer 0 at 8 lies within none of the arenas of 9, 10 bytes"),  # beyond the first
        ([0, 24, 16], {}, "buffer 1 at 24 lies within none"),  # beyond the second
        ([0, 16, 32], {}, "buffer 2 at 32 lies within none"),  # beyond both
        ([0, 16, 14], {}, "buffer 2 at 14 lies within none"),  # across the wall
        ([-16, 0, 16], {}, "buffer 0 at -16 has a negative offset"),
        ([2, 16, 20], {}, "buffer 0 at 2 is not aligned"),
        ([16, 20, 0], {}, "overlap"),
        (
            [16, 0, 4],
            {"arena_bytes": 12, "lower_bound_bytes": 12},
            "the arenas take 13 bytes together, not 12",
        ),
    ],
)
def test_checker_refuses_plans_outside_the_arenas(
    offset: list[int], claims: dict[str, Any], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        check(lying(offset, **claims), TWO)


def test_streams_share_arenas_where_separate_arenas_do_not_fit() -> None:
    buffers = Buffers.of([0, 4, 0], [4, 8, 8], [8, 8, 4], stream=[0, 1, 1])
    capacity = (8, 4)
    plan = solve_streams(buffers, wait_bytes=0, capacity=capacity)
    check(plan, buffers)
    assert plan.arenas == capacity
    assert (plan.status, plan.arena_bytes) == (Status.OPTIMAL, 12)
    enough = solve_streams(buffers, wait_bytes=0, capacity=(8, 12))
    assert enough.arena_bytes == 20
    padded = Buffers.of([0, 0], [1, 1], [3, 3], alignment=4, stream=[0, 1])
    plan = solve_streams(padded, wait_bytes=0, capacity=(3, 3))
    check(plan, padded)
    assert (plan.status, plan.lower_bound_bytes) == (Status.OPTIMAL, 6)


FEW = Stop(nodes=20_000)


@st.composite
def several_streams(draw: st.DrawFn, most: int = 14) -> Buffers:
    """Buffers of one iteration on up to three streams, some of which outlive the iteration."""
    n = draw(st.integers(2, most))
    life = draw(st.lists(st.integers(1, 2 * n), min_size=n, max_size=n))
    size = draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))
    stream = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    start = np.arange(n)
    return Buffers.of(
        start, start + np.array(life), np.array(size) * 64, stream=np.array(stream) * 7, period=n
    )


def alternating(turns: int = 4, size: int = 1 << 20) -> Buffers:
    """Two streams in turn: the buffers of one have ended when the other begins."""
    start = np.arange(2 * turns)
    return Buffers.of(start, start + 1, np.full(2 * turns, size), stream=start % 2, period=2 * turns)


def waits_by_bytes(plan: Plan, buffers: Buffers) -> float:
    """Count waits byte by byte and without clocks: each byte knows the stream and time of the last free."""
    assert plan.offset is not None
    assert buffers.period is not None
    period, unit = buffers.period, 64
    before = (int(buffers.lengths.max()) // period + 2) * plan.columns
    moments: list[tuple[int, int, int, int]] = []
    for iteration in range(before + plan.columns):
        for row in range(len(buffers)):
            for time, begins in ((buffers.start[row], 1), (buffers.end[row], 0)):
                moments.append((int(time) + iteration * period, begins, iteration, row))
    freed: dict[int, dict[int, int]] = {}
    heard: dict[tuple[int, int], int] = {}
    count = 0
    for now, (_, begins, iteration, row) in enumerate(sorted(moments), 1):
        low = int(plan.offset[row, iteration % plan.columns]) // unit
        places = range(low, low + int(buffers.size[row]) // unit)
        mine = int(buffers.stream[row])
        if not begins:
            for place in places:
                freed.setdefault(place, {})[mine] = now
            continue
        for other in set(buffers.stream.tolist()) - {mine}:
            latest = max((freed.get(place, {}).get(other, 0) for place in places), default=0)
            if latest > heard.get((mine, other), 0):
                heard[mine, other] = latest
                count += iteration >= before
    return count / plan.columns


@given(several_streams(), st.sampled_from([0, 64, 512, 1 << 40]))
def test_wait_count_equals_a_naive_replay(buffers: Buffers, price: int) -> None:
    plan = solve_streams(buffers, wait_bytes=price, stop=FEW, solver="greedy")
    check(plan, buffers)
    assert waits(plan, buffers) == waits_by_bytes(plan, buffers)


@given(several_streams(), st.integers(0, 4096))
def test_no_plan_costs_more_than_keeping_all_streams_apart(buffers: Buffers, price: int) -> None:
    def cost(plan: Plan) -> float:
        return plan.arena_bytes + price * waits(plan, buffers)

    apart = dataclasses.replace(buffers, group=buffers.stream)
    kept_apart = solve(apart, stop=FEW, solver="greedy")
    plan = solve_streams(buffers, wait_bytes=price, stop=FEW, solver="greedy")
    assert waits(kept_apart, buffers) == 0
    assert cost(plan) <= cost(kept_apart)
    assert plan.lower_bound_bytes <= lower_bound(buffers)
    assert plan.status is not Status.OPTIMAL or plan.arena_bytes == plan.lower_bound_bytes


def test_streams_share_addresses_where_the_saving_exceeds_the_wait_price() -> None:
    buffers = alternating()
    dear = solve_streams(buffers, wait_bytes=1 << 20, stop=FEW)
    cheap = solve_streams(buffers, wait_bytes=1 << 16, stop=FEW)
    assert (dear.arena_bytes, waits(dear, buffers)) == (2 << 20, 0)
    assert (cheap.arena_bytes, waits(cheap, buffers)) == (1 << 20, 8)
    assert dear.status is Status.FEASIBLE
    assert cheap.status is Status.OPTIMAL


def test_streams_share_with_waits_where_nothing_else_fits() -> None:
    buffers = alternating()
    plan = solve_streams(buffers, wait_bytes=1 << 40, capacity=1 << 20, stop=FEW)
    assert plan.arena_bytes == 1 << 20
    plan = solve_streams(buffers, wait_bytes=1 << 40, capacity=1 << 19, stop=FEW)
    assert plan.offset is None
    assert plan.status is Status.INFEASIBLE


def triangle(streams: int = 3) -> Buffers:
    """Three streams, one of which is empty at each time, in turn: any two peak together."""
    start, end, stream = zip(
        *[(t, t + 1, s) for t in range(streams) for s in range(streams) if s != t], strict=True
    )
    size = np.full(len(start), 1 << 20)
    return Buffers.of(np.array(start), np.array(end), size, stream=np.array(stream), period=streams)


def test_three_streams_share_where_no_two_alone_would_save() -> None:
    plan = solve_streams(triangle(), wait_bytes=0, stop=FEW)
    assert (plan.arena_bytes, plan.status) == (2 << 20, Status.OPTIMAL)
    plan = solve_streams(triangle(), wait_bytes=1 << 40, capacity=2 << 20, stop=FEW)
    assert plan.arena_bytes == 2 << 20
    apart = solve_streams(triangle(), wait_bytes=1 << 40, stop=FEW)
    assert (apart.arena_bytes, apart.status, apart.stopped_by) == (3 << 20, Status.FEASIBLE, "finished")


def test_never_is_never() -> None:
    plan = solve_streams(triangle(), wait_bytes=NEVER, capacity=2 << 20, stop=FEW)
    assert plan.status is Status.INFEASIBLE
    assert solve_streams(triangle(), wait_bytes=NEVER, stop=FEW).arena_bytes == 3 << 20


@pytest.mark.parametrize("way", ["interrupt", "Ctrl-C"])
def test_interruption_keeps_the_best_plan(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def interrupted(*args: Any, **how: Any) -> Plan:
        if made and way == "Ctrl-C":
            raise KeyboardInterrupt
        made.append(solve(*args, **how))
        return made[-1]

    monkeypatch.setattr("solvers.packing.streams.solve", interrupted)
    stop = Stop(nodes=1000, interrupt=lambda: way == "interrupt" and bool(made))
    plan = solve_streams(alternating(), wait_bytes=0, stop=stop)
    assert (plan.arena_bytes, plan.stopped_by, len(made)) == (2 << 20, "interrupt", 1)
    check(plan, alternating())


@pytest.mark.parametrize("stream", [0, [0, 0, 0, 0, 0, 0, 1]])
def test_proof_for_full_sharing_holds_for_the_plan(stream: int | list[int]) -> None:
    buffers = crossing(stream=stream)
    assert lower_bound(buffers) == 8
    plan = solve_streams(buffers, wait_bytes=0, stop=FEW)
    check(plan, buffers)
    assert (plan.arena_bytes, plan.lower_bound_bytes, plan.status) == (9, 9, Status.OPTIMAL)
    assert plan.stopped_by == "proof"


def test_negative_price_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        solve_streams(alternating(), wait_bytes=-1)
