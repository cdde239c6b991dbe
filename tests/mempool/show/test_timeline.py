"""Timelines: drawn pieces of lifetimes, and the load as their sum."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from shown import four_buffers

from mempool.show.thinning import load_of
from mempool.show.timeline import timeline_of
from solvers import load_curve, peak_load
from traces import Buffers, buffers_of

LINES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 99)), max_size=20)


@given(LINES)
def test_load_curve_equals_the_solvers_load_curve(rows: list[tuple[int, int, int]]) -> None:
    start = np.array([row[0] for row in rows], np.int64)
    buffers = Buffers.of(start, start + [row[1] for row in rows], [row[2] for row in rows])
    times, loads, (when, peak) = load_of(timeline_of(buffers, ""))
    theirs = load_curve(buffers)
    for time in range(62):
        assert _at(times, loads, time) == _at(*theirs, time)
    assert peak == peak_load(buffers)
    assert _at(times, loads, when) == peak


def _at(times: np.ndarray, loads: np.ndarray, time: int) -> int:
    at = int(np.searchsorted(times, time, side="right")) - 1
    return int(loads[at]) if at >= 0 else 0


def test_long_load_curve_is_short_and_keeps_its_peak() -> None:
    rng = np.random.default_rng(0)
    start = np.arange(100_000)
    buffers = Buffers.of(start, start + rng.integers(1, 500, 100_000), rng.integers(1, 10**6, 100_000))
    times, loads, (when, peak) = load_of(timeline_of(buffers, ""))
    assert len(times) < 10_000
    assert (peak, peak) == (peak_load(buffers), loads.max())
    assert loads[times == when] == peak


def test_gap_of_a_buffer_is_not_drawn() -> None:
    buffers = Buffers.of([0], [10], [5], gaps=[(0, 3, 6)])
    timeline = timeline_of(buffers, "")
    assert (timeline.start.tolist(), timeline.end.tolist()) == ([0, 6], [3, 10])
    assert timeline.owner.tolist() == [0, 0]


def test_circle_is_drawn_in_the_steady_state() -> None:
    """One iteration more than the repetition of addresses, with the buffers of earlier iterations."""
    buffers = Buffers.of([1, 5], [4, 14], [10, 20], period=6)
    timeline = timeline_of(buffers, "", columns=2)
    drawn = list(zip(timeline.owner.tolist(), timeline.start.tolist(), timeline.end.tolist(), strict=True))
    of_second = sorted((start, end) for owner, start, end in drawn if owner == 1)
    assert of_second == [(0, 2), (0, 8), (5, 14), (11, 18), (17, 18)]
    assert sorted((s, e) for owner, s, e in drawn if owner == 0) == [(1, 4), (7, 10), (13, 16)]
    assert load_of(timeline)[2][1] == peak_load(buffers)


def test_persistent_buffers_are_counted_but_not_drawn() -> None:
    buffers = Buffers.of([0, 0], [9, 9], [5, 7], persistent=[True, False])
    timeline = timeline_of(buffers, "")
    assert (timeline.persistent, timeline.owner.tolist()) == ((1, 5), [1])


def test_timeline_clock_equals_the_clock_of_the_trace() -> None:
    trace = four_buffers()
    clock = timeline_of(buffers_of(trace), "", trace=trace).clock
    assert clock is not None
    assert clock.tolist() == [list(range(8)), list(range(0, 8_000_000, 1_000_000))]
    still = four_buffers(time_ns=0)
    assert timeline_of(buffers_of(still), "", trace=still).clock is None
