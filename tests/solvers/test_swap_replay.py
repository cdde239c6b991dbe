"""The checker of swap schedules against a slow model, and the refusals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swap_steps import links, schedules, slow_loads, slow_stall, step_from, steps

from solvers import PlanError
from solvers.swap import PRESETS, Link, Schedule, Step, parse_link, replay

FREE = Link(0.0, 0.0, 0.0, 0.0)


@given(st.data())
def test_loads_equal_a_count_of_instances(data: st.DataObject) -> None:
    step = data.draw(steps())
    schedule = data.draw(schedules(step))
    assert replay(step, FREE, schedule).load.tolist() == slow_loads(step, schedule)
    assert step.load.tolist() == slow_loads(step, Schedule.empty())


@given(st.data())
@settings(deadline=None, max_examples=50)
def test_stall_equals_copies_made_in_sequence(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    schedule = data.draw(schedules(step))
    found = replay(step, link, schedule)
    turns = 200 if step.circular else 1
    assert found.stall_seconds == pytest.approx(slow_stall(step, link, schedule, turns), rel=0.02, abs=1e-9)
    assert found.iteration_seconds == pytest.approx(step.duration + found.stall_seconds)
    if not step.circular:
        assert found.wait.sum() == pytest.approx(found.stall_seconds)


@given(st.data())
def test_free_link_never_stalls_and_a_slower_link_never_stalls_less(data: st.DataObject) -> None:
    step, link = data.draw(steps(circles=False)), data.draw(links())
    schedule = data.draw(schedules(step))
    assert replay(step, FREE, schedule).stall_seconds == 0
    slower = dataclasses.replace(link, out_per_byte=2 * link.out_per_byte, in_fixed=link.in_fixed + 1)
    assert replay(step, slower, schedule).stall_seconds >= replay(step, link, schedule).stall_seconds - 1e-12


def chain() -> Step:
    """Buffer 0 is written at 0, read at 4 and 8; buffer 1 is in use all the time."""
    accesses = [(op, True) for op in range(10)]
    return step_from([1.0] * 10, [(4, [(0, True), (4, False), (8, False)]), (1, accesses)])


def move(**changes: int | bool) -> Schedule:
    row = {"buffer": 0, "last": 0, "out": 0, "release": 2, "fetch": 3, "use": 4, "copied": True} | changes
    return Schedule(*(np.array([value]) for value in row.values()))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"buffer": 7}, "no buffer"),
        ({"last": -1}, "outside of the step"),
        ({"last": 1, "out": 1}, "not an access and the next"),
        ({"use": 8, "fetch": 7, "release": 6}, "not an access and the next"),
        ({"last": 4, "out": 3, "release": 5, "fetch": 6, "use": 8}, "copied before its last use"),
        ({"release": 0}, "given back before its copy"),
        ({"fetch": 2}, "back before it is away"),
        ({"fetch": 5}, "used before it is back"),
        ({"last": 8, "out": 8, "release": 9, "fetch": 10, "use": 14}, "after the step"),
        ({"copied": False}, "no copy of|has no copy"),
    ],
)
def test_impossible_move_is_refused(changes: dict[str, int], what: str) -> None:
    replay(chain(), FREE, move())
    with pytest.raises(PlanError, match=what):
        replay(chain(), FREE, move(**changes))


def test_duplicate_move_is_refused() -> None:
    twice = Schedule(*(np.repeat(getattr(move(), f.name), 2) for f in dataclasses.fields(Schedule)))
    with pytest.raises(PlanError, match="twice"):
        replay(chain(), FREE, twice)


def test_value_only_read_since_its_copy_need_not_be_copied_again() -> None:
    link = Link(1.0, 0.0, 0.0, 0.0)
    both = Schedule(*np.array([[0, 0], [0, 4], [0, 4], [2, 5], [3, 7], [4, 8]]), np.array([True, False]))
    found = replay(chain(), link, both)
    assert found.stall_seconds == 0
    assert found.moved_bytes == 4
    assert found.returned_bytes == 8
    assert found.host_load.tolist() == [4] * 9 + [0]
    alone = both.select(np.array([1]))
    with pytest.raises(PlanError, match="no copy"):
        replay(chain(), link, alone)


def good_copies(step: Step, schedule: Schedule) -> list[bool]:
    """Return for each move whether the host has a copy at the begin, by walking back over the accesses."""
    k, good = len(step), []
    ended = {(int(b), int(use) % k) for b, use in zip(schedule.buffer, schedule.use, strict=True)}
    for buffer, last in zip(schedule.buffer.tolist(), schedule.last.tolist(), strict=True):
        rows = np.flatnonzero(step.access_buffer == buffer).tolist()
        ops = [int(step.access_op[row]) % k for row in rows]
        at = ops.index(last)
        back = rows[at::-1] + (rows[:at:-1] if step.persistent[buffer] else [])
        kept = False
        for row in back:
            if step.access_writes[row] or (kept := (buffer, int(step.access_op[row]) % k) in ended):
                break
        good.append(kept)
    return good


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_skippable_copies_equal_a_walk_along_the_accesses(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    schedule = data.draw(schedules(step))
    good = np.array(good_copies(step, schedule), np.bool_)
    replay(step, link, dataclasses.replace(schedule, copied=~good))
    for row in np.flatnonzero(~good).tolist():
        copied = ~good
        copied[row] = False
        with pytest.raises(PlanError, match=f"move {row} .* no copy"):
            replay(step, link, dataclasses.replace(schedule, copied=copied))


def test_a_single_engine_makes_all_copies_of_a_half_duplex_link() -> None:
    step = step_from([1.0] * 10, [(4, [(4, True), (9, False)]), (4, [(0, True), (6, False)])])
    both = Schedule(*np.array([[0, 1], [4, 0], [4, 0], [6, 2], [8, 5], [9, 6]]), np.array([True, True]))
    link = Link(0.0, 0.25, 0.0, 0.25)
    assert replay(step, link, both).stall_seconds == 0
    assert replay(step, dataclasses.replace(link, duplex=False), both).stall_seconds == 1.0


@pytest.mark.parametrize("name", PRESETS)
def test_link_is_parsed_from_a_name_or_numbers(name: str) -> None:
    assert parse_link(name) == PRESETS[name]
    assert not parse_link(f"{name},half").duplex
    assert parse_link("1e-5,8e-11") == Link(1e-5, 8e-11, 1e-5, 8e-11)
    assert parse_link("1e-5,8e-11,2e-5,9e-11,half") == Link(1e-5, 8e-11, 2e-5, 9e-11, duplex=False)


@pytest.mark.parametrize(
    "text",
    ["", "pcie", "1", "a,b", "1,2,3", "-1,2", "1e999,1", "1e300,1", "1001,0", "0,0.01", "nan,1", "1,2,3,4,5"],
)
def test_invalid_link_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="link"):
        parse_link(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds": np.full(10, np.nan)},
        {"seconds": np.full(10, -1.0)},
        {"size": np.array([-1, 1])},
        {"size": np.array([1])},
        {"start": np.array([20, 0])},
        {"end": np.array([0, 10])},
        {"end": np.array([11, 10])},
        {"access_buffer": np.full(13, 2)},
        {"access_op": np.arange(13)},
        {"persistent": np.array([True, True])},
    ],
)
def test_invalid_step_is_refused(changes: dict[str, np.ndarray]) -> None:
    with pytest.raises(PlanError):
        dataclasses.replace(chain(), **changes)
