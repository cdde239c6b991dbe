"""Schedules with other moments to copy."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from swap_steps import links, schedules, step_from, steps

from solvers.swap import Link, Schedule, replay
from solvers.swap.transfer_times import advance_reloads, delay_offloads

SOME = settings(deadline=None, max_examples=30)


@given(st.data())
@SOME
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
@SOME
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
