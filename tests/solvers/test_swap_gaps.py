"""Schedules that cost no more and leave fewer gaps."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from swap_steps import links, schedules, step_from, steps

from solvers import Stop, solve
from solvers.swap import Link, Schedule, Step, SwapPlanner, packed, replay
from solvers.swap.gaps import tightened
from solvers.swap.pool import device_buffers

SOME = settings(deadline=None, max_examples=15)


def arena_of(step: Step, schedule: Schedule) -> int:
    return solve(device_buffers(step, schedule)[0], stop=Stop(nodes=20_000)).arena_bytes


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_what_is_tightened_is_away_for_longer_and_nothing_else(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    schedule = data.draw(schedules(step))
    wait = replay(step, link, schedule).wait
    made = tightened(step, link, schedule, wait)
    replay(step, link, made)  # is possible
    assert (made.release <= schedule.release).all()
    assert (made.fetch >= schedule.fetch).all()
    for name in ("buffer", "last", "out", "use", "copied"):
        assert getattr(made, name).tolist() == getattr(schedule, name).tolist()


@given(st.data())
@SOME
def test_what_is_packed_waits_no_longer_holds_the_limit_and_takes_no_more(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    planner = SwapPlanner(step, link, least_bytes=0, tries=2)
    swap = planner.hold((planner.floor()[0] + step.peak_bytes) // 2)
    made = packed(planner, swap, lambda schedule: arena_of(step, schedule), variations=2)
    again = replay(step, link, made.schedule)
    assert again.stall_seconds == made.stall_seconds <= swap.stall_seconds * (1 + 1e-9)
    assert again.peak_bytes == made.peak_bytes <= swap.limit_bytes
    assert arena_of(step, made.schedule) <= arena_of(step, swap.schedule)


def test_nothing_lies_on_the_device_for_longer_than_its_copies_need() -> None:
    """There is room for all of it nearly all the time; a plan that fills it would be hard to place."""
    layers = 12
    size = np.random.default_rng(0).integers(1, 9, layers).tolist()
    step = step_from(
        [1.0] * 2 * layers, [(512 * size[i], [(i, True), (2 * layers - 1 - i, False)]) for i in range(layers)]
    )
    link = Link(0.0, 0.125 / 512, 0.0, 0.125 / 512)
    planner = SwapPlanner(step, link, least_bytes=0)
    swap = planner.hold((planner.without_stall().peak_bytes + step.peak_bytes) // 2)
    made = packed(planner, swap, lambda schedule: arena_of(step, schedule), within=0.0)
    assert made.stall_seconds == 0
    assert made.replayed.load.sum() < swap.replayed.load.sum()
    calls = list[int]()

    def counted(schedule: Schedule) -> int:
        calls.append(1)
        return arena_of(step, schedule)

    packed(planner, made, counted, within=9.0)
    assert len(calls) == 1  # good enough at once
