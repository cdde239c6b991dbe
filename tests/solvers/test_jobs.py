"""Jobs, bounds and the simplest solvers: columns, load curves, lower bounds and offsets of baselines."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from solvers import _core, load_curve, lower_bound, peak_load
from solvers.packing.bounds import pieces_of
from solvers.packing.jobs import jobs_of
from solvers.packing.options import OPTIONS
from traces.buffers import Buffers


def on_line(buffers: Buffers, cut: int) -> dict[int, list[tuple[int, int]]]:
    """Return the times of each buffer, in order, on the line that begins at ``cut``."""
    pieces, line = pieces_of(buffers), dict[int, list[tuple[int, int]]]()
    for row, start, end in zip(*(x.tolist() for x in (pieces.owner, pieces.start, pieces.end)), strict=True):
        parts = [(start, end)]
        if buffers.period is not None:
            start, end = (start - cut) % buffers.period, (start - cut) % buffers.period + end - start
            parts = [(start, min(end, buffers.period)), (0, end - buffers.period)]
        line.setdefault(row, []).extend(part for part in parts if part[0] < part[1])
    return {row: sorted(parts) for row, parts in line.items()}


@pytest.mark.parametrize("many", [0, 1000])
@given(st.data())
def test_jobs_are_the_pieces_of_each_buffer_from_the_lowest_load_on(many: int, data: st.DataObject) -> None:
    """Very many jobs are in the order of their buffers, fewer in the order of their first pieces."""
    buffers = data.draw(st.from_type(Buffers))
    buffers = buffers.unrolled(buffers.max_instances)
    times, loads = load_curve(buffers)
    cut = int(times[loads.argmin()]) if len(times) else 0
    expected = on_line(buffers, cut)
    rows = list(expected) if many else sorted(expected, key=lambda row: expected[row][0][0])
    with pytest.MonkeyPatch.context() as patch:
        options = dataclasses.replace(OPTIONS, sorted_by_start=many)
        patch.setattr("solvers.packing.jobs.OPTIONS", options)
        jobs = jobs_of(buffers)
    assert jobs.row.tolist() == rows
    assert jobs.pieces.tolist() == [len(expected[row]) for row in rows]
    pieces = list(zip(jobs.start.tolist(), jobs.end.tolist(), strict=True))
    assert pieces == [piece for row in rows for piece in expected[row]]
    for name, of in (("size", "size"), ("alignment", "alignment"), ("fixed", "offset")):
        np.testing.assert_array_equal(getattr(jobs, name), getattr(buffers, of)[rows])


@given(st.from_type(Buffers), st.integers(1, 10**9))
def test_extremes_of_the_load_equal_the_extremes_of_the_load_curve(buffers: Buffers, unit: int) -> None:
    """For dense and for sparse moments."""
    wide = Buffers.of(
        buffers.start * unit,
        buffers.end * unit,
        buffers.size,
        period=None if buffers.period is None else buffers.period * unit,
    )
    times, loads = load_curve(wide)
    load = pieces_of(wide).load
    assert load.peak == loads.max(initial=0)
    assert load.quietest == (times[loads.argmin()] if len(times) else 0)


@given(st.data())
def test_offsets_of_instances_are_put_where_their_buffers_are(data: st.DataObject) -> None:
    n, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    rows = np.array(data.draw(st.permutations(range(7)))[:n])
    jobs = np.array(data.draw(st.lists(st.integers(-1, n * columns - 1), unique=True)), np.int64)
    offsets = 100 + np.arange(len(jobs))
    into = np.zeros((7, columns), np.int64)
    _core.write_offsets(into, rows, jobs, offsets)
    expected = np.zeros_like(into)
    for job, offset in zip(jobs, offsets, strict=True):
        if job >= 0:
            expected[rows[job % n], job // n] = offset
    np.testing.assert_array_equal(into, expected)


def test_bad_columns_are_refused() -> None:
    one, none = np.ones(1, np.int64), np.zeros(0, np.int64)
    with pytest.raises(ValueError, match="different lengths"):
        _core.to_line(one, none, one, 0, 0, by_start=True)
    with pytest.raises(ValueError, match="not a piece"):
        _core.load_extremes(one, one * 0, one, one, 0)
    with pytest.raises(ValueError, match="not a piece"):
        _core.to_line(one, one, one, 0, 0, by_start=False)
    with pytest.raises(ValueError, match="longer than the period"):
        _core.to_line(one, one * 0, one * 3, 2, 0, by_start=False)
    with pytest.raises(ValueError, match="a period below 0"):
        _core.to_line(one, one * 0, one, -1, 0, by_start=False)
    with pytest.raises(ValueError, match="outside the period"):
        _core.to_line(one, one, one * 2, 2, 2, by_start=False)
    for measure in (_core.load_curve, _core.load_extremes):
        with pytest.raises(ValueError, match="a period below 0"):
            measure(one * 0, one, one * 2, one, -1)
        with pytest.raises(ValueError, match="not a piece"):  # on a circle there is no time before 0
            measure(one * 0, one * -(10**7), one, one, 10)
    table = np.zeros((1, 2), np.int64)
    for rows, jobs in ((one * 0, one * 2), (one, one * 0), (none, one * 0), (-one, one * 0)):
        with pytest.raises(ValueError, match="not a row of the table"):
            _core.write_offsets(table, rows, jobs, one)
    with pytest.raises(ValueError, match="different lengths"):
        _core.write_offsets(table, one, one, none)


@pytest.mark.parametrize(
    "table", [np.zeros((2, 2), np.int32), np.zeros((2, 2), np.int64, "F"), np.zeros((2, 4), np.int64)[:, ::2]]
)
def test_table_in_need_of_a_copy_is_refused(table: NDArray[np.int64]) -> None:
    """The offsets would be written into the copy."""
    with pytest.raises(TypeError, match="incompatible function arguments"):
        _core.write_offsets(table, np.arange(2), np.arange(1), np.ones(1, np.int64))


@pytest.mark.parametrize("alignment", [1, 2**62])
def test_absurdly_many_bytes_are_refused(alignment: int) -> None:
    """The sum of a size and an alignment beyond 64 bits is refused too."""
    with pytest.raises(ValueError, match=r"2\*\*62"):
        pieces_of(Buffers.of([0, 0], [1, 1], 2**62, alignment=alignment))


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


Ranges = list[tuple[int, int]]


def times(buffers: Buffers, i: int) -> set[int]:
    gaps = np.flatnonzero(buffers.gap_buffer == i)
    away = {t for g in gaps for t in range(buffers.gap_start[g], buffers.gap_end[g])}
    return set(range(buffers.start[i], buffers.end[i])) - away


def gaps_in(occupied: Ranges, alignment: int) -> tuple[Ranges, int]:
    """Return the gaps between the ranges from an aligned address on, lowest first, and the address on top."""
    free, at = list[tuple[int, int]](), 0
    for low, high in sorted(occupied):
        free.append((at, low))
        at = max(at, -(-high // alignment) * alignment)
    return free, at


def lowest(occupied: Ranges, size: int, alignment: int) -> int:
    free, top = gaps_in(occupied, alignment)
    return min([low for low, high in free if high - low >= size], default=top)
