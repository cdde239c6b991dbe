"""Conversion of buffers to events with the same lifetimes and the same load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import Buffers, EventType, TraceError
from traces.read import read
from traces.transforms import trace_of_buffers

BENCH = Path(__file__).parents[2] / "../shared/bench/minimalloc"


@st.composite
def lines(draw: st.DrawFn) -> Buffers:
    n = draw(st.integers(0, 12))
    start = np.array(draw(st.lists(st.integers(-5, 9), min_size=n, max_size=n)), np.int64)
    length = np.array(draw(st.lists(st.integers(0, 5), min_size=n, max_size=n)), np.int64)
    size = draw(st.lists(st.integers(0, 99), min_size=n, max_size=n))
    ids = [f"b{k}" for k in range(n)] if draw(st.booleans()) else None
    return Buffers.of(start, start + length, size, ids=ids)


@given(lines())
def test_events_are_sorted_and_have_the_load_of_the_buffers(buffers: Buffers) -> None:
    """After the last event of each time the load is that of the lifetimes around; between, never more."""
    trace = trace_of_buffers(buffers)
    assert len(trace) == 2 * len(buffers)
    assert (np.diff(trace.time_ns) >= 0).all()
    loads = {
        time: int(buffers.size[(buffers.start <= time) & (time < buffers.end)].sum())
        for time in trace.time_ns.tolist()
    }
    load = trace.load()
    last = np.flatnonzero(np.append(np.diff(trace.time_ns), 1)[: len(trace)])
    assert load[last].tolist() == list(loads.values())
    assert load.max(initial=0) == max(loads.values(), default=0)
    for row in np.flatnonzero(trace.kind == EventType.ALLOC).tolist():
        buffer = int(trace.buffer[row])
        assert trace.time_ns[row] == buffers.start[buffer]
        name = int(trace.operation[row])
        assert (trace.names[name] if name >= 0 else None) == (buffers.ids[buffer] if buffers.ids else None)


def test_offsets_and_alignment_are_kept_if_common_to_all() -> None:
    fixed = trace_of_buffers(Buffers.of([0, 1], [2, 3], [8, 8], offset=[64, 0], alignment=64))
    assert fixed.address.tolist() == [64, 0, -1, -1]
    assert fixed.alignment == 64
    mixed = trace_of_buffers(Buffers.of([0, 1], [2, 3], [8, 8], offset=[64, -1], alignment=[64, 1]))
    assert mixed.address.tolist() == [-1] * 4
    assert mixed.alignment == 1


@pytest.mark.parametrize(
    ("buffers", "reason"),
    [
        (Buffers.of([0], [3], [8], gaps=[(0, 1, 2)], ids=["a"]), "gaps of buffer 0 \\(a\\)"),
        (Buffers.of([0], [3], [8], period=4), "iteration"),
        (Buffers.of([0], [3], [8], persistent=True), "iteration"),
        (Buffers.of([0] * 3, [3] * 3, [2**62] * 3), "alive"),
    ],
)
def test_buffers_without_an_event_form_are_refused(buffers: Buffers, reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        trace_of_buffers(buffers)


def test_csv_is_read_as_a_trace_and_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("id,lower,upper,size\na,0,2,8\nb,2,3,4\n")
    trace = read(path)
    assert trace.kind.tolist() == [EventType.ALLOC, EventType.FREE, EventType.ALLOC, EventType.FREE]
    assert trace.load().tolist() == [8, 0, 4, 0]
    path.write_text("id,lower,upper,size,gaps\na,0,9,8,2-3\n")
    with pytest.raises(TraceError, match=r"x\.csv.*gaps"):
        read(path)
