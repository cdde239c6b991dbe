"""A step with swaps as a scene: loads equal the replay, absences lie between rectangles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shown import Packed
from swap_steps import links, one_move, schedules, step_from, steps

from mempool.show import content, swap_scene
from mempool.show.thinning import load_of
from solvers import PlanError
from solvers.swap import Link, Schedule, Step, replay

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mempool.show import Scene, Timeline, View

LINK = Link(0.0, 1.0, 0.0, 1.0)


@st.composite
def moving(draw: st.DrawFn) -> tuple[Step, Link, Schedule]:
    """A step with a schedule of at least one move."""
    step = draw(steps())
    schedule = draw(schedules(step).filter(len))
    return step, draw(links()), schedule


def scene(given_: tuple[Step, Link, Schedule]) -> Scene:
    return swap_scene(*given_)


@given(moving())
def test_drawn_load_equals_the_replay(one: tuple[Step, Link, Schedule]) -> None:
    step, k = one[0], len(one[0])
    timeline = scene(one).timelines[0]
    turns = -(-int(timeline.end.max()) // k)
    times, loads, _ = load_of(timeline)
    drawn = at(times, loads, turns * k)
    assert drawn == replay(*one).load.tolist() * turns
    assert timeline.before is not None
    assert at(timeline.before[0], timeline.before[1], turns * k) == step.load.tolist() * turns


def at(times: NDArray[np.int64], loads: NDArray[np.int64], count: int) -> list[int]:
    """The load at each time."""
    where = np.searchsorted(times, np.arange(count), side="right") - 1
    drawn: list[int] = np.where(where < 0, 0, loads[np.maximum(where, 0)]).tolist()
    return drawn


@given(moving())
def test_each_absence_lies_between_two_rectangles_of_its_buffer(one: tuple[Step, Link, Schedule]) -> None:
    """Both rectangles are drawn; an absence within the first turn appears in every turn."""
    made = scene(one)
    timeline, view = made.timelines[0], made.views[0]
    moved = view.moved
    assert moved is not None
    turns = -(-int(timeline.end.max()) // len(one[0]))
    most = turns * len(one[0])
    pieces = ends(timeline, view, timeline.start) | ends(timeline, view, -timeline.end)
    for k in range(len(moved.row)):
        row = int(moved.row[k])
        assert moved.out[k] <= moved.gone[k] <= moved.back[k] <= moved.use[k] <= most
        if 0 < moved.gone[k] < most:
            assert (row, -int(moved.gone[k]), int(moved.left[k])) in pieces
        if 0 < moved.back[k] < most:
            assert (row, int(moved.back[k]), int(moved.found[k])) in pieces
    within = (one[2].use < len(one[0])).sum()
    assert len(moved.row) >= within * turns


def ends(timeline: Timeline, view: View, edge: NDArray[np.int64]) -> set[tuple[int, ...]]:
    """Buffer, edge and address of each piece."""
    return set(zip(timeline.owner.tolist(), edge.tolist(), view.address.tolist(), strict=True))


@given(moving())
def test_page_holds_the_moves_and_the_clock_of_a_swap_scene(one: tuple[Step, Link, Schedule]) -> None:
    back = Packed(content.content_of(scene(one))[0])
    view, timeline = back.said["views"][0], back.said["timelines"][0]
    assert timeline["ticks"] == "operations"
    assert len(back.column(view["moved"]["row"])) > 0
    assert back.said["views"][1]["moved"] is None
    assert (np.diff(back.column(timeline["clock"][1])) >= 0).all()


def test_invalid_and_empty_schedules_are_refused() -> None:
    step = step_from([1.0] * 4, [(8, [(0, True), (3, False)])])
    wrong = one_move((0, 0, 0, 1, 3, 3), copied=False)
    with pytest.raises(PlanError, match="host has no copy"):
        swap_scene(step, LINK, wrong)
    with pytest.raises(PlanError, match="nothing moves"):
        swap_scene(step, LINK, Schedule.empty())
    good = one_move((0, 0, 0, 1, 3, 3))
    with pytest.raises(PlanError, match="seconds"):
        swap_scene(step.with_seconds(np.full(4, 1e200)), LINK, good)
    with pytest.raises(PlanError, match="seconds"):
        swap_scene(step, Link(1e200, 0.0, 0.0, 0.0), good)
