"""Loads are counted right on lines and circles, and no plan is below the bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers import load_curve, lower_bound, peak_load
from traces.buffers import Buffers


def load_by_counting(buffers: Buffers) -> dict[int, int]:
    """Bytes alive at each time, instance by instance, time by time."""
    load: dict[int, int] = {}
    for i in np.flatnonzero(~buffers.persistent):
        gaps = np.flatnonzero(buffers.gap_buffer == i)
        for t in range(buffers.start[i], buffers.end[i]):
            if any(buffers.gap_start[g] <= t < buffers.gap_end[g] for g in gaps):
                continue
            at = t if buffers.period is None else t % buffers.period
            load[at] = load.get(at, 0) + int(buffers.size[i])
    return load


@given(st.from_type(Buffers))
def test_load_curve_is_the_sum_of_live_buffers_at_each_time(buffers: Buffers) -> None:
    times, loads = load_curve(buffers)
    counted = load_by_counting(buffers)
    assert (np.diff(times) > 0).all()
    for t in range(40 if buffers.period is None else buffers.period):
        k = int(np.searchsorted(times, t, side="right")) - 1
        assert (int(loads[k]) if k >= 0 else 0) == counted.get(t, 0)
    assert peak_load(buffers) == max(counted.values(), default=0)


@given(st.from_type(Buffers))
def test_lower_bound_is_at_least_the_peak_load(buffers: Buffers) -> None:
    assert lower_bound(buffers) >= peak_load(buffers)


@given(st.from_type(Buffers), st.integers(1, 3))
def test_unrolling_a_circle_changes_neither_peak_load_nor_bound(buffers: Buffers, k: int) -> None:
    if buffers.period is not None:
        assert peak_load(buffers.unrolled(k)) == peak_load(buffers)
        assert lower_bound(buffers.unrolled(k)) == lower_bound(buffers)


def test_padding_counts_for_all_but_the_topmost_buffer() -> None:
    assert lower_bound(Buffers.of([0, 0, 0], [1, 1, 1], [5, 6, 8], alignment=8)) == 8 + 8 + 5
    assert lower_bound(Buffers.of([0, 0], [1, 1], [5, 6], alignment=[8, 1])) == 11


def test_groups_and_fixed_offsets_bound_the_arena() -> None:
    assert lower_bound(Buffers.of([0, 1], [1, 2], [5, 6], group=[0, 1])) == 11
    assert lower_bound(Buffers.of([0, 1], [1, 2], [5, 6], offset=[-1, 100])) == 106


def test_overflowing_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 2\\*\\*62 bytes"):
        peak_load(Buffers.of([0, 0, 0], [1, 1, 1], 2**61))
    with pytest.raises(ValueError, match="more than 2\\*\\*62 bytes"):
        peak_load(Buffers.of([0], [2**40], 2**30, period=2))
