"""Streams that share an arena."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from instances import crossing

from solvers import Plan, Status, Stop, check, lower_bound, solve
from solvers.packing.streams import NEVER, solve_streams, waits
from traces.buffers import Buffers

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
    plan = solve_streams(buffers, wait_bytes=0)
    check(plan, buffers)
    assert (plan.arena_bytes, plan.lower_bound_bytes, plan.status) == (9, 9, Status.OPTIMAL)
    assert plan.stopped_by == "proof"


def test_negative_price_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        solve_streams(alternating(), wait_bytes=-1)
