"""The innermost interval around a time, compared with a search of all intervals."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from traces.intervals import innermost


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
