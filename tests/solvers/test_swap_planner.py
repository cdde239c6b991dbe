"""Swap plans: the constraints they keep, and the bounds they meet."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swap_steps import links, step_from, steps

from solvers import PlanError
from solvers.swap import Link, LinkBound, OffloadPlanner, OffloadTunables, Step, replay
from solvers.swap.absences import absences_of
from solvers.swap.fluid_bound import fluid_stall_bound
from solvers.swap.operation_groups import group_operations

SOME = settings(deadline=None, max_examples=15)
GROUPED = OffloadTunables(ungrouped_operations=2)


def planner(step: Step, link: Link) -> OffloadPlanner:
    return OffloadPlanner(step, link, least_bytes=0, tries=4)


@given(st.data())
@SOME
def test_plan_holds_its_limit_and_stalls_at_least_as_long_as_the_link_bound(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    made = planner(step, link)
    limit = data.draw(st.integers(made.floor()[0], max(step.peak_bytes, made.floor()[0])))
    swap = made.hold(limit)
    again = replay(step, link, swap.schedule)
    assert again.peak_bytes <= limit
    assert again.stall_seconds == swap.stall_seconds
    bound = LinkBound(step, link, intervals=data.draw(st.integers(1, 24)))
    assert bound.stall_seconds(limit) <= swap.stall_seconds + 1e-9


@given(st.data())
@SOME
def test_stall_free_plan_reaches_at_least_the_link_bound(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    free = planner(step, link).without_stall()
    assert free.stall_seconds == 0
    assert free.peak_bytes <= step.peak_bytes
    assert LinkBound(step, link).peak_bytes() <= free.peak_bytes


@given(st.data())
@SOME
def test_higher_limit_never_stalls_longer(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    made = planner(step, link)
    floor = made.floor()[0]
    limits = sorted({floor + (step.peak_bytes - floor) * k // 4 for k in range(5)})
    stalls = [swap.stall_seconds for swap in made.curve(limits)]
    assert stalls == sorted(stalls, reverse=True)
    assert stalls[-1] == 0


@pytest.mark.parametrize("answer", [None, False])
def test_link_bound_claims_nothing_where_the_linear_solver_fails(
    answer: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links so slow that the solver's numbers run out, for example, or that it errs about."""
    layers = 6
    buffers = [(1 << 20, [(layer, True), (2 * layers - 1 - layer, False)]) for layer in range(layers)]
    step, link = step_from([1e-3] * 2 * layers, buffers), Link.of_rate(1e9)
    made = planner(step, link)
    limit = step.peak_bytes // 2
    monkeypatch.setattr("solvers.swap.link_bound._Program._solve", lambda _: answer)
    assert LinkBound(step, link).peak_bytes() <= made.without_stall().peak_bytes
    assert 0 <= LinkBound(step, link).stall_seconds(limit) <= made.hold(limit).stall_seconds


def test_flat_load_is_bounded_by_several_operations_together() -> None:
    """Memory is short for long, and the next buffer returns before the last buffer has left."""
    buffers = [(4, [(op, True), (op + 4, False), (op + 8, False)]) for op in range(32)]
    step, link = step_from([1.0] * 40, buffers), Link(0.0, 0.5, 0.0, 0.5)
    made = planner(step, link)
    limit = made.floor()[0] + 4
    whole = LinkBound(step, link).stall_seconds(limit)
    assert 20 < whole <= made.hold(limit).stall_seconds


@given(st.data())
@SOME
def test_stretch_of_a_single_operation_keeps_the_bound_valid_and_no_lower(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    step = step.without(step.untouched)  # which are away for nothing
    made = planner(step, link)
    limit = data.draw(st.integers(made.floor()[0], max(step.peak_bytes, made.floor()[0])))
    intervals, op = data.draw(st.integers(1, 24)), data.draw(st.integers(0, len(step) - 1))
    told = partial(fluid_stall_bound, step, link, made.absences, limit, intervals=intervals)
    assert told() <= told(isolated=[op]) + 1e-6 * step.duration
    assert told(isolated=[op]) <= made.hold(limit).stall_seconds + 1e-6 * step.duration


@given(st.data())
@SOME
def test_planner_is_deterministic(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    limit = (planner(step, link).floor()[0] + step.peak_bytes) // 2
    first, second = (planner(step, link).hold(limit).schedule for _ in range(2))
    for name in ("buffer", "out", "release", "fetch", "use"):
        assert getattr(first, name).tolist() == getattr(second, name).tolist()


def hump(layers: int = 8, size: int = 4) -> Step:
    """Each layer's output is written on the way up and read on the way down."""
    k = 2 * layers
    return step_from([1.0] * k, [(size, [(i, True), (k - 1 - i, False)]) for i in range(layers)])


def test_no_absence_of_a_long_step_is_left_out() -> None:
    """Each absence is needed: all but three layers' outputs must be away."""
    layers = 2100
    made = OffloadPlanner(hump(layers), Link(0.0, 1e-3, 0.0, 1e-3), tries=0)
    assert len(made.absences) == layers - 1
    limit = 4 * 4
    assert made.floor()[0] <= 2 * 4
    held = made.hold(limit)
    assert held.peak_bytes <= limit
    assert held.stall_seconds == 0
    assert made.without_stall().peak_bytes <= limit


def test_limit_below_the_working_set_is_refused_with_its_numbers() -> None:
    step = step_from(
        [1.0] * 4, [(5, [(0, True), (1, False)]), (7, [(1, True), (3, False)]), (2, [(1, True)])]
    )
    made = planner(step, Link(0.0, 0.0, 0.0, 0.0))
    with pytest.raises(
        PlanError, match=r"no gain possible below 14 bytes: operation 1 touches 14 bytes, and 0"
    ):
        made.hold(13)


def test_plan_within_a_slowdown_keeps_the_slowdown() -> None:
    made = planner(hump(), Link(0.0, 0.5, 0.0, 0.5))
    free = made.without_stall()
    for slower in (0.1, 0.5, 2.0):
        found = made.within_slowdown(slower)
        assert found.stall_seconds <= slower * made.step.duration
        assert found.peak_bytes <= free.peak_bytes
    assert made.within_slowdown(4.0).peak_bytes < free.peak_bytes


@given(st.data())
@SOME
def test_coarse_grid_keeps_peak_load_and_duration(data: st.DataObject) -> None:
    step = data.draw(steps())
    absences = absences_of(step)
    grid = group_operations(step, absences, most_ungrouped=2)
    assert grid.load.max() == step.peak_bytes
    assert grid.seconds.sum() == pytest.approx(step.duration)
    k = len(step)
    assert grid.operations(grid.absences.use, k).tolist() == absences.use.tolist()
    assert grid.operations(grid.absences.last + 1, k).tolist() == (absences.last + 1).tolist()


@given(st.data())
@SOME
def test_plan_on_a_coarse_grid_holds_its_limit(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    made = OffloadPlanner(step, link, least_bytes=0, tries=2, tunables=GROUPED)
    limit = (made.floor()[0] + step.peak_bytes) // 2
    try:
        assert made.hold(limit).peak_bytes <= limit
    except PlanError:
        assert len(group_operations(step, absences_of(step), most_ungrouped=2).first) < len(step)
    assert made.without_stall().stall_seconds == 0


@given(st.data())
@SOME
def test_nearest_plan_holds_the_limit_or_the_floor(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    made = planner(step, link)
    limit = data.draw(st.integers(0, step.peak_bytes + 1))
    near = made.nearest(limit)
    assert near.peak_bytes <= near.limit_bytes
    assert near.limit_bytes == max(limit, made.floor()[0])


@given(st.data(), st.floats(0, 1.2))
@SOME
def test_no_plan_exceeds_the_host_limit(data: st.DataObject, share: float) -> None:
    step, link = data.draw(steps()), data.draw(links())
    wide = planner(step, link)
    limit = data.draw(st.integers(wide.floor()[0], max(step.peak_bytes, wide.floor()[0])))
    most = int(share * max(step.peak_bytes - limit, 0))
    made = OffloadPlanner(step, link, least_bytes=0, tries=4, host_limit=most)
    for found in (made.nearest(limit), made.without_stall(), made.within_slowdown(0.5)):
        again = replay(step, link, found.schedule)
        assert again.host_bytes <= most
        assert again.peak_bytes <= found.limit_bytes
    try:
        assert made.hold(limit).replayed.host_bytes <= most
    except PlanError as error:
        assert f"{most}" in str(error)  # noqa: PT017 - either is right


def test_host_limit_equal_to_the_necessary_bytes_suffices() -> None:
    """Early copies would occupy the host long before memory is short."""
    step, link = hump(32), Link(0.0, 0.01, 0.0, 0.01)
    for limit in (40, 64, 100):
        least = step.peak_bytes - limit
        made = OffloadPlanner(step, link, host_limit=least + 4)
        assert made.hold(limit).peak_bytes <= limit
        with pytest.raises(
            PlanError, match=f"leave at least {least:,} to the host, more than its {least - 1:,}"
        ):
            OffloadPlanner(step, link, host_limit=least - 1).hold(limit)
