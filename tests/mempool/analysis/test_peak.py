"""Buffers alive at the peak, compared with a loop over the events."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mempool.analysis.peak import Role, absences, at_peak, by_bytes_and_time, shares
from mempool.analysis.remedies import remedies
from traces import EventType, Trace

A, F, R, W, *_ = EventType


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    rows: list[tuple[int, int, int, int]] = []
    alive: list[int] = []
    for _ in range(draw(st.integers(0, 40))):
        kind = draw(st.sampled_from([A, A, F, R, W]))
        name = draw(st.integers(-1, 2))
        if kind == A:
            alive.append(len(rows))
            rows.append((A, len(rows), draw(st.integers(0, 9)), name))
        elif alive:
            buffer = draw(st.sampled_from(alive))
            rows.append((kind, buffer, 0, -1))
            if kind == F:
                alive.remove(buffer)
    kind, buffer, size, name = np.array(rows, np.int64).reshape(-1, 4).T
    return Trace.of(kind, buffer, size, operation=name, names=["mul", "add", "mm"])


@given(traces())
def test_buffers_at_the_peak_equal_a_loop_over_the_events(trace: Trace) -> None:
    alive: dict[int, int] = {}
    best: dict[int, int] = {}
    event = 0
    for row in range(len(trace)):
        if trace.kind[row] == A:
            alive[row] = int(trace.size[row])
        elif trace.kind[row] == F:
            del alive[int(trace.births[row])]
        if sum(alive.values()) > sum(best.values()):
            best, event = dict(alive), row
    peak = at_peak(trace)
    assert peak.bytes == sum(best.values())
    if peak.bytes:
        assert peak.event == event
        found = dict(zip(peak.alloc.tolist(), peak.size.tolist(), strict=True))
        assert found == {row: size for row, size in best.items() if size}
    assert (np.diff(peak.size) <= 0).all()


@given(traces())
def test_shares_add_up_to_the_peak_and_the_largest_comes_first(trace: Trace) -> None:
    peak = at_peak(trace)
    every = shares(trace, peak, trace.operation, 10)
    assert sum(share.bytes for share in every) == int(peak.size.sum())
    assert sum(share.buffers for share in every) == len(peak.size)
    assert [share.bytes for share in every] == sorted((share.bytes for share in every), reverse=True)
    assert shares(trace, peak, trace.operation, 1) == every[:1]
    for share in every:
        number = -1 if share.name is None else trace.names.index(share.name)
        assert share.bytes == int(peak.size[trace.operation[peak.alloc] == number].sum())


@given(traces())
def test_absences_equal_a_search_per_buffer(trace: Trace) -> None:
    peak = at_peak(trace)
    found = absences(trace, peak)
    accesses = np.flatnonzero((trace.kind == R) | (trace.kind == W)).tolist()
    if not accesses:
        assert found is None
        return
    assert found is not None
    for k, alloc in enumerate(peak.alloc.tolist()):
        own = [row for row in accesses if trace.births[row] == alloc]
        assert found.last[k] == max([alloc, *(row for row in own if row <= peak.event)])
        later = [row for row in own if row > peak.event]
        assert found.next[k] == (min(later) if later else peak.end[k])
        assert found.used_again[k] == bool(later)


def test_roles_distinguish_persistent_and_wrap_around_buffers() -> None:
    kind = [A, A, A, F, A, A, F, F, A, A, F, F]
    buffer = [0, 1, 2, 2, 3, 4, 4, 1, 5, 6, 6, 3]
    trace = Trace.of(kind, buffer, [1, 2, 4, 0, 8, 16, 0, 0, 32, 64, 0, 0])
    peak = at_peak(trace, np.array([1, 4, 8]))
    role = dict(zip(peak.size.tolist(), peak.role.tolist(), strict=True))
    assert role == {64: Role.PASSING, 32: Role.TO_THE_END, 8: Role.WRAP_AROUND, 1: Role.PERSISTENT}


def test_buffers_never_freed_are_not_passing() -> None:
    """After the last boundary, and without any boundary."""
    trace = Trace.of([A, A, A, F], [0, 1, 2, 2], [1, 2, 4, 0])
    for begins in (None, np.array([], np.int64), np.array([0]), np.array([1])):
        peak = at_peak(trace, begins)
        role = dict(zip(peak.size.tolist(), peak.role.tolist(), strict=True))
        assert role[4] == Role.PASSING
        assert role[2] == Role.TO_THE_END
        assert role[1] == (Role.TO_THE_END if begins is None or 1 not in begins else Role.WRAP_AROUND)


def test_buffer_held_long_ranks_above_a_larger_short_lived_buffer() -> None:
    trace = Trace.of([A, W, W, W, A, F, F], [0, 0, 0, 0, 1, 1, 0], [10, 0, 0, 0, 20, 0, 0])
    peak = at_peak(trace)
    assert peak.size.tolist() == [20, 10]
    assert by_bytes_and_time(peak).tolist() == [1, 0]


def test_remedies_tell_late_frees_from_absences() -> None:
    late, away, used = 0, 1, 2
    kind = [A, A, A, W, W, W, A, R, F, R, F, F, F]
    buffer = [late, away, used, late, away, used, 3, used, 3, away, late, away, used]
    size = [100, 50, 25, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    trace = Trace.of(kind, buffer, size)
    peak = at_peak(trace)
    found = remedies(peak, absences(trace, peak), None, iteration_events=40)
    assert {one.name: one.saves_bytes for one in found} == {"free_earlier": 100, "swap": 50}
    assert remedies(peak, None, None, 40) == []
