"""Any buffers, solver and limits: the plan is valid, and the stated quality true."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from instances import fits, hard, tight

from solvers import Plan, Status, Stop, check, lower_bound, peak_load, solve
from solvers.packing import greedy
from solvers.packing.jobs import Jobs, jobs_of
from solvers.packing.options import OPTIONS
from traces.buffers import Buffers

FAST = Stop(nodes=20_000)


@given(buffers=st.from_type(Buffers), seed=st.integers(0, 3))
def test_every_plan_passes_the_check_and_states_its_quality_truly(buffers: Buffers, seed: int) -> None:
    plan = solve(buffers, solver="greedy", seed=seed, stop=FAST)
    if plan.offset is None:
        assert plan.status is Status.INFEASIBLE
        assert "fixed offset" in plan.reason
        return
    check(plan, buffers)
    assert plan.columns >= buffers.max_instances
    assert plan.lower_bound_bytes >= peak_load(buffers)
    assert (plan.status is Status.OPTIMAL) == (plan.arena_bytes == plan.lower_bound_bytes)
    assert (plan.stopped_by == "bound") <= (plan.status is Status.OPTIMAL)


#: Two buffers that need 29 bytes where addresses repeat after four iterations, and 25 where after three.
ROTATED = Buffers.of([1, 4], [22, 24], [5, 5], alignment=[4, 1], gaps=[(1, 6, 24)], period=7)


@settings(max_examples=40, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.from_type(Buffers))
@example(ROTATED)
def test_auto_equals_brute_force(buffers: Buffers) -> None:
    few = buffers.select(np.arange(min(len(buffers), 4 if buffers.max_instances == 1 else 2)))
    one_group = dataclasses.replace(few, group=np.zeros(len(few), np.int64))
    least = one_group.max_instances
    plan = solve(one_group, columns=least)
    smallest = next((n for n in range(peak_load(one_group), 61) if fits(one_group, n)), None)
    if plan.offset is None:
        assert plan.status is Status.INFEASIBLE
        assert smallest is None
        return
    check(plan, one_group)
    assert plan.status is Status.OPTIMAL
    assert plan.arena_bytes == smallest
    assert solve(one_group, stop=FAST, columns=least).arena_bytes == smallest
    free = solve(one_group, stop=FAST)  # several numbers of columns share the nodes
    assert free.arena_bytes <= smallest or free.stopped_by == "nodes"
    below = solve(one_group, columns=least, capacity=max(plan.arena_bytes - 1, 0))
    assert below.status is (Status.INFEASIBLE if plan.arena_bytes else Status.OPTIMAL)


@given(st.from_type(Buffers), st.integers(0, 40))
def test_capacity_is_kept_or_no_plan_is_returned(buffers: Buffers, capacity: int) -> None:
    plan = solve(buffers, capacity=capacity, stop=FAST, solver="greedy")
    if plan.offset is None:
        assert plan.status in (Status.INFEASIBLE, Status.UNKNOWN)
        assert plan.reason
        assert plan.arena_bytes == 0
        free = solve(buffers, stop=FAST, solver="greedy")
        assert free.offset is None or free.arena_bytes > capacity
    else:
        check(plan, buffers)
        assert plan.arena_bytes <= capacity


def test_capacity_below_the_bound_is_infeasible_and_an_unreached_capacity_unknown() -> None:
    buffers = hard()
    assert solve(buffers, capacity=lower_bound(buffers) - 1).status is Status.INFEASIBLE
    missed = solve(buffers, capacity=lower_bound(buffers), stop=Stop(nodes=1000))
    assert missed.status is Status.UNKNOWN
    assert "smallest arena found" in missed.reason


def training(n: int, *, circle: bool, seed: int = 0) -> Buffers:
    """Activations freed in reverse order, short temporaries, gradients that outlive the iteration."""
    random = np.random.default_rng(seed)
    period, kept, wrapped = 2 * n, n // 4, n // 8
    forward = np.sort(random.choice(n, kept, replace=False))
    short = random.integers(0, period - 40, n - kept - wrapped)
    late = random.integers(n, period, wrapped)
    start = np.concatenate([forward, short, late])
    end = np.concatenate(
        [
            period - 1 - forward,
            short + random.integers(1, 40, len(short)),
            period + random.integers(0, period // 50, wrapped),
        ]
    )
    size = random.lognormal(12, 2, n).astype(np.int64) // 512 * 512 + 512
    return Buffers.of(
        start, end if circle else np.minimum(end, period), size, period=period if circle else None
    )


@pytest.mark.parametrize("circle", [False, True])
@pytest.mark.parametrize("n", [100, 1000, 4000])
def test_training_shaped_buffers_are_packed_within_a_thousandth_of_the_peak_load(
    n: int, circle: bool
) -> None:
    buffers = training(n, circle=circle)
    plan = solve(buffers, solver="greedy", stop=Stop(nodes=50_000_000))
    check(plan, buffers)
    assert plan.fragmentation(buffers) < 1e-3


def test_same_seed_and_nodes_give_the_same_plan() -> None:
    buffers = tight(1500, 3)
    stop = Stop(nodes=3_000_000)
    first, second = (solve(buffers, seed=7, stop=stop, solver="greedy") for _ in range(2))
    assert first.offset is not None
    assert second.offset is not None
    assert (first.offset == second.offset).all()
    assert first.stopped_by == second.stopped_by == "nodes"
    # The result does not depend on slices, and so not on callbacks between them.
    seen: list[Plan] = []
    again = solve(buffers, seed=7, stop=stop, solver="greedy", on_improvement=seen.append)
    assert again.arena_bytes == seen[-1].arena_bytes == first.arena_bytes


@pytest.mark.parametrize("solver", ["greedy", "auto"])
@pytest.mark.parametrize("seed", [-1, 2**64 + 1])
def test_any_integer_is_a_seed(solver: str, seed: int) -> None:
    """Also integers too wide for the kernels, with a solver that uses all kernels."""
    check(solve(hard(), seed=seed, stop=Stop(nodes=3_000_000), solver=solver), hard())


def test_more_nodes_never_give_a_larger_arena() -> None:
    arenas = [
        solve(hard(), stop=Stop(nodes=nodes), solver="greedy").arena_bytes for nodes in (0, 10**5, 10**7)
    ]
    assert arenas == sorted(arenas, reverse=True)
    assert arenas[0] > arenas[-1]


def test_every_improvement_is_a_valid_and_smaller_plan() -> None:
    buffers, seen = hard(), list[Plan]()
    plan = solve(buffers, stop=Stop(nodes=10**7), on_improvement=seen.append)
    assert len(seen) > 1
    for better in seen:
        check(better, buffers)
    arenas = [better.arena_bytes for better in seen]
    assert arenas == sorted(set(arenas), reverse=True)
    assert plan.arena_bytes == arenas[-1]


def test_time_limit_leaves_time_to_assemble_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The more buffers, the earlier the solver stops."""
    buffers = hard()
    options = dataclasses.replace(OPTIONS, assembly_seconds=60 / (len(buffers) - 1))
    monkeypatch.setattr("solvers.packing.solve.OPTIONS", options)
    plan = solve(buffers, stop=Stop(seconds=60))
    check(plan, buffers)
    assert plan.stopped_by == "time"
    assert plan.seconds < 30
    assert solve(buffers.select(np.arange(20)), stop=Stop(seconds=60)).stopped_by != "time"


def test_clock_target_and_interrupt_stop_the_solver_and_are_named() -> None:
    buffers = hard()
    assert solve(buffers, stop=Stop(seconds=0.0)).stopped_by == "time"
    began = time.perf_counter()
    assert solve(tight(1500, 3), stop=Stop(seconds=0.02), solver="greedy").stopped_by == "time"
    assert time.perf_counter() - began < 60
    assert solve(buffers, stop=Stop(interrupt=lambda: True)).stopped_by == "interrupt"
    start = solve(buffers, stop=Stop(nodes=0)).arena_bytes
    reached = solve(buffers, stop=Stop(target_bytes=start - 1))
    assert reached.stopped_by == "target"
    assert reached.arena_bytes < start
    fits = solve(buffers, capacity=start - 1)
    assert fits.stopped_by == "target"


def test_keyboard_interrupt_before_the_first_plan_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(task: object, order: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(greedy, "run_in_order", interrupted)
    with pytest.raises(KeyboardInterrupt):
        solve(hard())


def test_ctrl_c_as_another_number_of_columns_is_begun_with_returns_the_best_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Buffers] = []

    def interrupted(unrolled: Buffers, *args: Any) -> Jobs:
        if begun:
            raise KeyboardInterrupt
        begun.append(unrolled)
        return jobs_of(unrolled, *args)

    monkeypatch.setitem(solve.__globals__, "jobs_of", interrupted)
    start = np.arange(3)
    buffers = Buffers.of(start, start + 4, np.array([100, 130, 170]), period=3, alignment=np.full(3, 64))
    plan = solve(buffers, stop=FAST, solver="greedy")
    check(plan, buffers)
    assert plan.stopped_by == "interrupt"
    assert plan.nodes > 0


def test_several_groups_are_stacked_and_each_is_packed() -> None:
    buffers = dataclasses.replace(hard(), group=np.arange(120) % 3)
    plan = solve(buffers, stop=FAST)
    check(plan, buffers)
    assert plan.gap < 0.5
    pinned = np.full(120, -1)
    pinned[[0, 1, 2]] = [0, 5000, 500]  # one of each group
    fixed = dataclasses.replace(buffers, offset=pinned)
    check(solve(fixed, stop=FAST), fixed)


def test_contradictory_fixed_offsets_are_named() -> None:
    overlap = solve(Buffers.of([0, 1], [2, 3], 4, offset=[0, 3], ids=["a", "b"]))
    assert overlap.status is Status.INFEASIBLE
    assert overlap.reason == "the fixed offsets of buffer 0 (a) and buffer 1 (b) overlap"
    skew = solve(Buffers.of([0], [2], 4, offset=2, alignment=4))
    assert skew.reason == "the fixed offset of buffer 0 is not a multiple of its alignment"
    groups = solve(Buffers.of([0, 5], [1, 6], 4, offset=[0, 3], group=[0, 1]))
    assert groups.reason == "the fixed offsets of buffer 0 and another group overlap"
    itself = solve(Buffers.of([0], [3], 4, offset=8, period=2))
    assert itself.reason == "the fixed offsets of buffer 0 and buffer 0 overlap"


def test_requests_that_no_solver_can_meet_are_refused() -> None:
    with pytest.raises(ValueError, match="0 threads"):
        solve(hard(), threads=0)
    with pytest.raises(ValueError, match="2 columns are fewer than the 3 instances"):
        solve(Buffers.of([0], [5], 100, period=2), columns=2)
    with pytest.raises(ValueError, match="no solver 'magic'; there are auto, greedy"):
        solve(hard(), solver="magic")
    with pytest.raises(ValueError, match="lives 100 periods, more than 64"):
        solve(Buffers.of([0], [1000], 1, period=10))


def test_rotating_buffers_need_as_many_columns_as_buffers_alive() -> None:
    """Three buffers replaced one after the other: two columns need six slots, four need four."""
    start = np.arange(3)
    buffers = Buffers.of(start, start + 4, 100, period=3)
    assert solve(buffers, columns=2, stop=FAST).arena_bytes == 600
    plan = solve(buffers, stop=FAST)
    check(plan, buffers)
    assert plan.arena_bytes == peak_load(buffers) == 400
    assert plan.columns == 4


def test_reported_plans_share_read_only_offsets() -> None:
    """A change of a reported plan would change the last plan."""
    told = list[Plan]()

    def change(plan: Plan) -> None:
        assert plan.offset is not None
        told.append(plan)
        with pytest.raises(ValueError, match="WRITEABLE"):
            plan.offset.flags.writeable = True

    solve(Buffers.of([0, 1], [2, 3], 8), on_improvement=change)
    assert told
