"""Resting buffers: untouched in an iteration, away all the time, and never copied."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from swap_steps import links, one_move, step_from, steps

from solvers import PlanError
from solvers.swap import Link, LinkBound, OffloadPlanner, Schedule, Step, replay
from solvers.swap.placement import place
from solvers.swap.schedule_file import (
    StepSelection,
    move_rows,
    read_schedule,
    resting_rows,
    step_and_link_keys,
)

if TYPE_CHECKING:
    from pathlib import Path

SOME = settings(deadline=None, max_examples=15)


def with_untouched(step: Step, sizes: list[int]) -> Step:
    """Return the step with the given further buffers, which stay from turn to turn."""
    n, more = len(step.size), len(sizes)
    return dataclasses.replace(
        step,
        start=np.append(step.start, np.zeros(more, np.int64)),
        end=np.append(step.end, np.full(more, len(step))),
        size=np.append(step.size, np.array(sizes, np.int64)),
        persistent=np.append(step.persistent, np.ones(more, np.bool_)),
        ids=np.arange(n + more),
    )


@given(st.data(), st.lists(st.integers(1, 9), max_size=3))
@SOME
def test_untouched_buffers_cost_no_device_memory_and_no_time(data: st.DataObject, sizes: list[int]) -> None:
    plain, link = data.draw(steps()), data.draw(links())
    assume(plain.circular)
    step = with_untouched(plain, sizes)
    made, bare = (OffloadPlanner(one, link, least_bytes=0, tries=2) for one in (step, plain))
    assert made.floor() == bare.floor()
    assert LinkBound(step, link).peak_bytes() == LinkBound(plain, link).peak_bytes()
    assert made.without_stall().peak_bytes == bare.without_stall().peak_bytes
    limit = data.draw(st.integers(made.floor()[0], max(plain.peak_bytes, made.floor()[0])))
    found, other = made.hold(limit), bare.hold(limit)
    assert found.stall_seconds == other.stall_seconds
    again = replay(step, link, found.schedule)
    assert again.peak_bytes <= limit
    assert (again.host_load - other.replayed.host_load == sum(sizes)).all()
    assert again.moved_bytes == other.replayed.moved_bytes
    device, host = place(step, found.schedule)
    assert not np.isin(found.schedule.resting, device.of).any()
    assert np.isin(found.schedule.resting, host.of).all()


def idle() -> Step:
    """A step: buffer 0 stays and is used once; 1 lives for two operations; 2 and 3 stay untouched."""
    plain = step_from(
        [1.0] * 4, [(4, [(1, True)]), (2, [(0, True), (1, False)])], circular=True, persistent={0}
    )
    return with_untouched(plain, [8, 16])


LINK = Link(0.0, 0.01, 0.0, 0.01)


def test_untouched_buffers_leave_only_where_memory_is_short_and_the_host_has_room() -> None:
    step = idle()
    made = OffloadPlanner(step, LINK, least_bytes=0)
    assert not len(made.hold(step.peak_bytes).schedule.resting)
    assert made.hold(step.peak_bytes - 1).schedule.resting.tolist() == [3, 2]
    assert made.without_moves(step.peak_bytes).peak_bytes == step.peak_bytes
    for room, rests in ((24, [3, 2]), (20, [3]), (15, [])):
        some = OffloadPlanner(step, LINK, least_bytes=0, host_limit=room)
        assert some.without_stall().schedule.resting.tolist() == rests
        assert some.without_stall().replayed.host_bytes <= room
    assert OffloadPlanner(step, LINK, least_bytes=9).without_stall().schedule.resting.tolist() == [3]


@pytest.mark.parametrize(
    ("rows", "why"), [([0], "is needed"), ([1], "is needed"), ([2, 2], "twice"), ([9], "does not have")]
)
def test_replay_refuses_to_rest_buffers_in_use(rows: list[int], why: str) -> None:
    step = idle()
    with pytest.raises(PlanError, match=why):
        replay(step, LINK, dataclasses.replace(Schedule.empty(), resting=np.array(rows)))


def test_resting_buffers_are_in_the_file_of_moves(tmp_path: Path) -> None:
    step = idle()
    schedule = dataclasses.replace(one_move((0, 1, 1, 2, 4, 5)), resting=np.array([2, 3]))
    said = {
        **step_and_link_keys(StepSelection((0, 4)), LINK),
        "limits": [{"limit_bytes": 9}],
        "operations": len(step),
        "peak_load_bytes": step.peak_bytes,
        "moves": move_rows(step, schedule),
        "resting": resting_rows(step, schedule),
    }
    path = tmp_path / "moves.json"
    path.write_text(json.dumps(said))
    again = read_schedule(path).schedule(step)
    assert sorted(again.resting.tolist()) == [2, 3]
    assert again.select(np.array([0])).buffer.tolist() == [0]
    for wrong in ([{"row": 2, "buffer": 1}], [{"row": 99, "buffer": 99}]):
        path.write_text(json.dumps(said | {"resting": wrong}))
        with pytest.raises(PlanError, match="does not have"):
            read_schedule(path).schedule(step)
    for broken in (7, [{"row": "x"}], [{"row": -1, "buffer": 1}]):
        path.write_text(json.dumps(said | {"resting": broken}))
        with pytest.raises(PlanError, match="no moves"):
            read_schedule(path)
