"""Views: drawn addresses keep order, sizes and neighbours, and map back to real addresses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shown import four_buffers

from mempool.show import scene_of
from mempool.show.timeline import timeline_of
from mempool.show.view import recorded_view
from solvers import Plan, Status
from solvers.packing.arenas import arenas_of
from solvers.packing.plan import stride_of
from traces import Buffers, EventType, Trace

ROWS = st.lists(
    st.tuples(st.one_of(st.integers(0, 2**62), st.integers(-1, 10**4)), st.integers(1, 2**40)), max_size=12
)


@given(ROWS)
def test_drawn_address_maps_back_to_the_real_address(rows: list[tuple[int, int]]) -> None:
    """The region below a drawn address gives the real address, and nothing is drawn above the top."""
    address = np.array([row[0] for row in rows], np.int64)
    size = np.array([row[1] for row in rows], np.int64)
    timeline = timeline_of(Buffers.of(np.zeros(len(rows), np.int64), 1, size), "")
    view = recorded_view("", 0, timeline, address)
    drawn, real = view.regions
    for at, low in zip(view.address.tolist(), address[timeline.owner].tolist(), strict=True):
        if low < 0:
            assert at == -1
            continue
        region = int(np.searchsorted(drawn, at, side="right")) - 1
        assert at - int(drawn[region]) + int(real[region]) == low
    ends = view.address + timeline.size[timeline.owner]
    assert ends[view.address >= 0].max(initial=0) <= view.top


def test_large_hole_between_addresses_is_left_out() -> None:
    timeline = timeline_of(Buffers.of([0, 0], [1, 1], [100, 50]), "")
    view = recorded_view("", 0, timeline, np.array([2**41, 2**40]))
    assert sorted(view.address.tolist()) == [0, 50]
    assert view.top == 150


@pytest.mark.parametrize("sizes", [(2**62, 2**62), (2**61, 2**61 + 1)])
def test_byte_sums_beyond_the_address_space_are_an_error(sizes: tuple[int, int]) -> None:
    """Sums over a file never wrap around: neither of segment sizes nor of segment addresses."""
    trace = Trace.of(
        [EventType.ALLOC, EventType.RESERVE, EventType.RESERVE],
        [0, -1, -1],
        [1, *sizes],
        address=[0, 2**61, 2**62 + 2**61],
    )
    with pytest.raises(ValueError, match=r"more than 2\*\*62"):
        scene_of(trace)


def test_several_arenas_are_stacked() -> None:
    buffers = Buffers.of([0, 0], [1, 1], [60, 40])
    capacities = (64, 128)
    arenas_of(capacities)
    offset = np.array([[0], [stride_of(capacities) + 8]])
    plan = Plan(offset, 108, 100, Status.FEASIBLE, "", 0, 0.0, "", arenas=capacities)
    (view,) = scene_of(buffers, plan=plan).views
    assert (view.address.tolist(), view.top) == ([0, 72], 192)


def test_each_iteration_uses_its_own_column() -> None:
    """A buffer longer than the period alternates between two addresses."""
    buffers = Buffers.of([0], [8], [10], period=5)
    plan = Plan(np.array([[0, 10]]), 20, 20, Status.OPTIMAL, "", 0, 0.0, "", period=5)
    scene = scene_of(buffers, plan=plan)
    (view,), (timeline,) = scene.views, scene.timelines
    for iteration, address in zip(timeline.iteration.tolist(), view.address.tolist(), strict=True):
        assert address == 10 * (iteration % 2)


def test_every_device_has_a_timeline() -> None:
    trace = four_buffers(device=[0, 1, 0, 0, 1, 1, 0, 1])
    scene = scene_of(trace)
    assert [timeline.title for timeline in scene.timelines] == ["device 0", "device 1"]
    assert [(view.title, view.timeline) for view in scene.views] == [("recorded", 0), ("recorded", 1)]


def test_trace_without_addresses_gets_a_plan() -> None:
    (view,) = scene_of(four_buffers(address=-1)).views
    assert (view.title, view.offsets) == ("planned, greedy", True)
    assert (view.address >= 0).all()


def test_plan_of_the_traces_own_buffers_shares_its_timeline() -> None:
    from solvers import solve
    from traces import buffers_of

    trace = four_buffers()
    scene = scene_of(trace, plan=solve(buffers_of(trace), solver="greedy"))
    assert [(view.title, view.timeline) for view in scene.views] == [("recorded", 0), ("plan", 0)]
