"""Transfer times: delayed offloads, earlier reloads, and schedules of equal stall with less fragmentation."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from swap_steps import links, one_move, schedules, step_from, steps

from solvers import Stop, solve
from solvers.swap import Link, OffloadPlanner, Schedule, Step, reduce_fragmentation, replay
from solvers.swap.placement import device_buffers
from solvers.swap.transfer_times import advance_reloads, delay_offloads, tighten

SOME = settings(deadline=None, max_examples=15)


def arena_of(step: Step, schedule: Schedule) -> int:
    return solve(device_buffers(step, schedule)[0], stop=Stop(nodes=20_000)).arena_bytes


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_tightened_moves_are_away_for_longer_and_otherwise_equal(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    schedule = data.draw(schedules(step))
    wait = replay(step, link, schedule).wait
    made = tighten(step, link, schedule, wait)
    replay(step, link, made)  # is possible
    assert (made.release <= schedule.release).all()
    assert (made.fetch >= schedule.fetch).all()
    for name in ("buffer", "last", "out", "use", "copied"):
        assert getattr(made, name).tolist() == getattr(schedule, name).tolist()


@given(st.data())
@SOME
def test_packed_schedule_stalls_no_longer_holds_the_limit_and_needs_no_larger_arena(
    data: st.DataObject,
) -> None:
    step, link = data.draw(steps()), data.draw(links())
    planner = OffloadPlanner(step, link, least_bytes=0, tries=2)
    swap = planner.hold((planner.floor()[0] + step.peak_bytes) // 2)
    made = reduce_fragmentation(planner, swap, lambda schedule: arena_of(step, schedule), variations=2)
    again = replay(step, link, made.schedule)
    assert again.stall_seconds == made.stall_seconds <= swap.stall_seconds * (1 + 1e-9)
    assert again.peak_bytes == made.peak_bytes <= swap.limit_bytes
    assert arena_of(step, made.schedule) <= arena_of(step, swap.schedule)


def test_tightened_buffer_is_on_the_device_no_longer_than_its_copies_need() -> None:
    """Operations and copies take a second; a quarter of a second is the margin."""
    step = step_from([1.0] * 16, [(4, [(0, True), (12, False)])])
    link = Link(0.0, 0.25, 0.0, 0.25)
    for margin, gone, back in ((1.0, 3, 10), (0.99, 2, 11), (9.0, 6, 7)):
        made = tighten(step, link, one_move((0, 0, 0, 6, 7, 12)), np.zeros(16), margin=margin)
        assert (made.release.tolist(), made.fetch.tolist()) == ([gone], [back])


def test_placement_stops_at_the_first_good_schedule() -> None:
    step = step_from([1.0] * 16, [(4, [(i, True), (15 - i, False)]) for i in range(8)])
    planner = OffloadPlanner(step, Link(0.0, 0.5, 0.0, 0.5), least_bytes=0)
    swap = planner.hold(planner.floor()[0] + 4)
    assert swap.stall_seconds > 0
    placed = list[Schedule]()

    def arena(schedule: Schedule) -> int:
        placed.append(schedule)
        return 1 << 40

    reduce_fragmentation(planner, swap, arena, within=2.0**40)
    assert len(placed) == 1
    reduce_fragmentation(planner, swap, arena, within=0.0)
    assert len(placed) > 2


@given(st.data())
@settings(deadline=None, max_examples=30)
def test_later_copy_out_changes_no_load_and_takes_no_more_host_memory(
    data: st.DataObject,
) -> None:
    step, link = data.draw(steps()), data.draw(links())
    schedule = data.draw(schedules(step))
    before = replay(step, link, schedule)
    later = delay_offloads(step, link, schedule, before.wait)
    after = replay(step, link, later)
    assert after.load.tolist() == before.load.tolist()
    at_once = Schedule(**{**vars(schedule), "out": schedule.last})
    made = delay_offloads(step, link, at_once, replay(step, link, at_once).wait)
    assert (replay(step, link, made).host_load <= replay(step, link, at_once).host_load).all()


def test_copy_out_with_spare_time_is_delayed_at_no_cost() -> None:
    step, link = step_from([1.0] * 10, [(4, [(0, True), (9, False)])]), Link(0.0, 0.2, 0.0, 0.2)
    schedule = Schedule(*([one] for one in (0, 0, 0, 6, 7, 9, True)))
    later = delay_offloads(step, link, schedule, np.zeros(10))
    assert later.out.tolist() == [4]
    assert replay(step, link, later).stall_seconds == 0


@given(st.data(), st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_earlier_copy_back_stays_within_the_limit(data: st.DataObject, seed: int) -> None:
    step, link = data.draw(steps()), data.draw(links())
    schedule = data.draw(schedules(step))
    before = replay(step, link, schedule)
    limit = data.draw(st.integers(0, step.peak_bytes))
    waited = np.random.default_rng(seed).random(len(schedule)) * 3
    sooner = advance_reloads(step, schedule, waited, limit)
    after = replay(step, link, sooner)
    assert (after.load <= np.maximum(before.load, limit)).all()
    assert (sooner.fetch <= schedule.fetch).all()
    assert (sooner.fetch[waited == 0] == schedule.fetch[waited == 0]).all()


def test_copy_back_is_requested_earlier_by_its_stall() -> None:
    step = step_from([1.0] * 10, [(4, [(0, True), (9, False)]), (4, [(1, True), (5, False)])])
    schedule = Schedule(*([one] for one in (0, 0, 0, 2, 9, 9, True)))
    assert advance_reloads(step, schedule, np.array([2.5]), 8).fetch.tolist() == [6]
    assert advance_reloads(step, schedule, np.array([2.5]), 7).fetch.tolist() == [6]
    assert advance_reloads(step, schedule, np.array([9.0]), 7).fetch.tolist() == [6]  # no room before
