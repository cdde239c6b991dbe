"""Buffers of a schedule in the arena and on the host."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swap_steps import links, schedules, steps

from solvers import PlanError, Stop, load_curve
from solvers.swap import OffloadPlanner, replay
from solvers.swap.placement import device_buffers, host_buffers, place


def loads(buffers: object, k: int) -> list[int]:
    times, values = load_curve(buffers)  # type: ignore[arg-type]
    at = np.searchsorted(times, np.arange(k), side="right") - 1
    return [int(values[i]) if i >= 0 else 0 for i in at]


@given(st.data())
@settings(deadline=None)
def test_arena_load_equals_the_replay_at_each_operation(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    schedule = data.draw(schedules(step))
    found = replay(step, link, schedule)
    assert loads(device_buffers(step, schedule, alignment=1)[0], len(step)) == found.load.tolist()
    assert loads(host_buffers(step, schedule, alignment=1)[0], len(step)) == found.host_load.tolist()


@given(st.data())
@settings(deadline=None, max_examples=30)
def test_both_arenas_are_planned_after_the_schedule(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    planner = OffloadPlanner(step, link, least_bytes=0, tries=1)
    swap = planner.hold((planner.floor()[0] + step.peak_bytes) // 2)
    schedule = swap.schedule
    device, host = place(step, schedule, stop=Stop(nodes=1000))
    made_once = np.setdiff1d(schedule.buffer, schedule.buffer[schedule.copied])
    assert len(host.buffers) == int(schedule.copied.sum()) + len(made_once)
    exact, of, which = host_buffers(step, schedule, alignment=1)
    np.testing.assert_array_equal(of[which], schedule.buffer)
    begin, length = exact.start[which], (exact.end - exact.start)[which]
    for needed in (schedule.release, schedule.fetch, schedule.use):  # the copy that a move has is there then
        since = needed - begin
        assert (np.where(step.circular, since % len(step), since) < length).all()
        assert step.circular or (since >= 0).all()
    assert loads(exact, len(step)) == swap.replayed.host_load.tolist()
    assert len(device.buffers) >= len(step.size)
    if host.plan.arena_bytes:
        with pytest.raises(PlanError, match="on the host"):
            place(step, schedule, stop=Stop(nodes=1000), host_limit=host.plan.arena_bytes - 1)
