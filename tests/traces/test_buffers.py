"""Buffers and intervals of traces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import Buffers, EventType, Trace, TraceError, buffers_of
from traces.intervals import innermost

A, F, R, W, M, *_ = EventType


@st.composite
def circular(draw: st.DrawFn) -> Buffers:
    period = draw(st.integers(1, 12))
    n = draw(st.integers(0, 6))
    start = draw(st.lists(st.integers(0, period - 1), min_size=n, max_size=n))
    length = draw(st.lists(st.integers(0, 3 * period), min_size=n, max_size=n))
    size = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    end = [s + d for s, d in zip(start, length, strict=True)]
    gaps = [(i, s + 1, s + 2) for i, (s, e) in enumerate(zip(start, end, strict=True)) if e - s >= 2]
    ids = [f"b{i}" for i in range(n)] if draw(st.booleans()) else None
    return Buffers.of(start, end, size, gaps=gaps, ids=ids, period=period)


def load_over_time(buffers: Buffers, periods: int) -> list[int]:
    """Return the bytes alive at each time of ``periods`` steady iterations, counted instance by instance."""
    assert buffers.period is not None
    total = periods * buffers.period
    load = np.zeros(total, np.int64)
    for start, end, size in zip(buffers.start, buffers.end, buffers.size, strict=True):
        for time in range(start, end):
            load[time % buffers.period :: buffers.period] += size
    return load.tolist()


@given(circular(), st.integers(1, 4))
def test_unrolling_preserves_the_load_at_every_time(buffers: Buffers, k: int) -> None:
    unrolled = buffers.unrolled(k)
    assert len(unrolled) == k * len(buffers)
    assert unrolled.period == k * buffers.period
    assert load_over_time(unrolled, 1) == load_over_time(buffers, k)
    assert len(unrolled.gap_buffer) == k * len(buffers.gap_buffer)


@given(circular())
def test_unrolling_by_max_instances_leaves_a_single_instance_per_buffer(buffers: Buffers) -> None:
    assert buffers.unrolled(buffers.max_instances).max_instances == 1


@given(circular(), st.data())
def test_select_keeps_gaps_and_ids_of_each_buffer(buffers: Buffers, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(buffers))))[: data.draw(st.integers(0, len(buffers)))]
    chosen = buffers.select(np.array(order, np.int64))
    assert chosen.start.tolist() == [buffers.start[i] for i in order]
    assert chosen.ids == (None if buffers.ids is None else tuple(buffers.ids[i] for i in order))
    for new, old in enumerate(order):
        mine, theirs = chosen.gap_buffer == new, buffers.gap_buffer == old
        assert chosen.gap_start[mine].tolist() == buffers.gap_start[theirs].tolist()
        assert chosen.gap_end[mine].tolist() == buffers.gap_end[theirs].tolist()
    mask = np.isin(np.arange(len(buffers)), order)
    assert buffers.select(mask).start.tolist() == buffers.start[mask].tolist()


def test_persistent_and_wrap_around_buffers_are_distinguished() -> None:
    buffers = Buffers.of([0, 3, 8, 8], [10, 7, 12, 29], 64, period=10, persistent=[True, False, False, False])
    assert buffers.select(~buffers.persistent).start.tolist() == [3, 8, 8]
    assert buffers.wrap_around.tolist() == [False, False, True, True]
    assert buffers.instances.tolist() == [1, 1, 1, 3]
    assert buffers.max_instances == 3
    assert buffers.lengths.tolist() == [10, 4, 4, 21]


@pytest.mark.parametrize(
    ("columns", "row", "reason"),
    [
        ({"start": [0, 5], "end": [1, 4], "size": 1}, 1, "end before start"),
        ({"start": [0, 5], "end": [1, 6], "size": [1, -1]}, 1, "negative size"),
        ({"start": [0], "end": [1], "size": [2**62 + 1]}, 0, "size beyond"),
        ({"start": [0], "end": [2**63 - 1], "size": [1]}, 0, "time beyond"),
        ({"start": [0], "end": [1], "size": [1], "alignment": 3}, 0, "power of two"),
        ({"start": [0], "end": [1], "size": [1], "alignment": 0}, 0, "power of two"),
        ({"start": [0], "end": [1], "size": [1], "alignment": -(2**63)}, 0, "power of two"),
        ({"start": [0], "end": [1], "size": [1], "offset": -2}, 0, "negative offset"),
        ({"start": [0, 1], "end": 2, "size": 1, "ids": ["a", "a"]}, 1, "duplicate id 'a'"),
        ({"start": [0, 1], "end": 2, "size": 1, "ids": ["a"]}, None, "1 ids for 2"),
        ({"start": [0, 10], "end": 20, "size": 1, "period": 10}, 1, "outside the period"),
        ({"start": [0], "end": 20, "size": 1, "period": 0}, None, "period 0"),
        ({"start": [0], "end": [9], "size": 1, "gaps": [(0, 3, 3)]}, 0, "ends before it starts"),
        ({"start": [0], "end": [9], "size": 1, "gaps": [(0, 8, 10)]}, 0, "outside the lifetime"),
        ({"start": [0], "end": [9], "size": 1, "gaps": [(0, 3, 6), (0, 5, 7)]}, 0, "overlap"),
        ({"start": [0], "end": [9], "size": 1, "gaps": [(1, 3, 6)]}, None, "gap of buffer 1"),
        ({"start": [0], "end": [9], "size": [1.5]}, None, "float64"),
        ({"start": [-(2**62)], "end": [2**62], "size": 1}, 0, "time beyond"),
        ({"start": [0], "end": [9], "size": 1, "gaps": [(0, 1.5, 6)]}, None, "gap_buffer holds float64"),
        ({"start": [0, 1], "end": [9], "size": 1}, None, "column end has 1 rows, not 2"),
    ],
)
def test_impossible_buffer_is_reported_with_the_row(columns: dict, row: int | None, reason: str) -> None:
    with pytest.raises(TraceError, match=reason) as caught:
        Buffers.of(**columns)
    assert caught.value.row == row


def test_buffers_of_a_trace_live_from_their_alloc_to_their_free_or_the_end() -> None:
    trace = Trace.of(
        [A, A, M, R, F, A], [9, 4, -1, 9, 9, 0], [8, 16, 0, 0, 0, 32], metadata={"alignment": "64"}
    )
    buffers = buffers_of(trace)
    assert buffers.start.tolist() == [0, 1, 5]
    assert buffers.end.tolist() == [4, 6, 6]
    assert buffers.size.tolist() == [8, 16, 32]
    assert buffers.alignment.tolist() == [64, 64, 64]
    assert buffers.period is None
    assert buffers_of(trace, alignment=512).alignment.tolist() == [512] * 3
    assert len(buffers_of(Trace.of([], []))) == 0


def test_buffers_of_different_streams_or_devices_share_no_address() -> None:
    trace = Trace.of([A, A, A, A], [0, 1, 2, 3], 8, stream=[5, 5, 0, 0], device=[0, 0, 0, 1])
    group = buffers_of(trace).group.tolist()
    assert group[0] == group[1]
    assert len(set(group)) == 3


@st.composite
def nested(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Return intervals of three groups that nest or are disjoint, in any order, some of them empty."""
    found: list[tuple[int, int, int]] = []

    def within(start: int, end: int, group: int, depth: int) -> None:
        cuts = sorted(draw(st.lists(st.integers(start, end), max_size=4)))
        for begin, stop in zip(cuts[::2], cuts[1::2], strict=False):
            found.append((begin, stop, group))
            if depth:
                within(begin, stop, group, depth - 1)

    for group in range(3):
        within(0, 30, group, 2)
    return draw(st.permutations(found))


@given(spans=nested(), asked=st.lists(st.tuples(st.integers(-1, 31), st.integers(0, 3)), max_size=20))
def test_innermost_interval_is_the_shortest_around_the_time(
    spans: list[tuple[int, int, int]], asked: list[tuple[int, int]]
) -> None:
    start, end, group = np.array(spans, np.int64).reshape(-1, 3).T
    time, owner = np.array(asked, np.int64).reshape(-1, 2).T
    found = innermost(start, end, group, time, owner)
    for row, (moment, whose) in zip(found, asked, strict=True):
        holding = [b - a for a, b, g in spans if g == whose and a <= moment < b]
        if row < 0:
            assert not holding
        else:
            a, b, g = spans[row]
            assert (g == whose, a <= moment < b, b - a) == (True, True, min(holding))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12), st.integers(0, 21))
def test_overlapping_intervals_never_give_a_wrong_result(spans: list[tuple[int, int]], moment: int) -> None:
    start, end = np.array([sorted(span) for span in spans], np.int64).reshape(-1, 2).T
    zero = np.zeros(len(start), np.int64)
    (row,) = innermost(start, end, zero, np.array([moment]), np.array([0]))
    assert row < 0 or start[row] <= moment < end[row]
