"""Traces made from buffers and from other traces."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import Buffers, EventType, Trace, TraceError
from traces.read import read
from traces.transforms import pools_as_streams, refused_as_buffers, trace_of_buffers, without_contradictions
from traces.workload import generate

if TYPE_CHECKING:
    from pathlib import Path


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


EVENTS = st.lists(
    st.tuples(st.sampled_from([*EventType, 9]), st.integers(-1, 3), st.integers(-1, 5)), max_size=30
)


@given(EVENTS)
def test_remaining_events_are_valid_and_removed_events_are_counted(
    events: list[tuple[int, int, int]],
) -> None:
    """Compare with a loop over the events: a buffer may be born once, used while alive and freed."""
    kind, buffer, size = zip(*events, strict=True) if events else ((), (), ())
    trace = Trace.of(kind, buffer, size)
    skipped = Counter[str]()
    left = without_contradictions(trace, skipped)
    left.validate()
    alive: dict[int, bool] = {}
    kept = []
    for event in events:
        what, whose, bytes_ = event
        sized = what in (EventType.ALLOC, EventType.RESERVE, EventType.RELEASE, EventType.REFUSED)
        if not 0 <= what <= max(EventType) or bytes_ < 0 or (bytes_ and not sized):
            continue
        if what >= EventType.MARK:
            if whose == -1:
                kept.append(event)
            continue
        if (
            whose < 0
            or (what == EventType.ALLOC) == (whose in alive)
            or (what != EventType.ALLOC and not alive[whose])
        ):
            continue
        alive[whose] = what != EventType.FREE
        kept.append(event)
    assert list(zip(left.kind.tolist(), left.buffer.tolist(), left.size.tolist(), strict=True)) == kept
    assert skipped.total() == len(events) - len(kept)


def test_valid_trace_is_unchanged() -> None:
    trace = generate(50, 1, accesses=True)
    assert without_contradictions(trace, Counter()) is trace


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1))
def test_pairs_of_pool_and_stream_become_different_streams(pairs: list[tuple[int, int]]) -> None:
    """A free is in the pool of its alloc; a trace without private pools stays unchanged."""
    pool, stream = (list(column) * 2 for column in zip(*pairs, strict=True))
    kind = [EventType.ALLOC] * len(pairs) + [EventType.FREE] * len(pairs)
    trace = Trace.of(
        kind,
        [*range(len(pairs))] * 2,
        [8] * len(pairs) + [0] * len(pairs),
        stream=stream,
        pool=pool[: len(pairs)] + [0] * len(pairs),
    )
    found = pools_as_streams(trace).stream
    if not any(pool):
        np.testing.assert_array_equal(found, trace.stream)
    same = {pair: int(at) for pair, at in zip(pairs * 2, found, strict=True)}
    assert found.tolist() == [same[pair] for pair in pairs * 2]
    assert len(set(same.values())) == len(same)


@given(
    st.lists(
        st.tuples(st.sampled_from([EventType.ALLOC, EventType.REFUSED, EventType.MARK]), st.integers(0, 9))
    )
)
def test_attempts_raise_the_load_for_a_single_event_only(events: list[tuple[int, int]]) -> None:
    kind = [what for what, _ in events]
    buffer = [at if what == EventType.ALLOC else -1 for at, what in enumerate(kind)]
    size = [bytes_ if what != EventType.MARK else 0 for what, bytes_ in events]
    trace = Trace.of(kind, buffer, size)
    attempted, rows = refused_as_buffers(trace)
    attempted.validate()
    refused = trace.kind == EventType.REFUSED
    assert not (attempted.kind == EventType.REFUSED).any()
    assert len(attempted) == len(trace) + refused.sum()
    last = np.flatnonzero(np.append(rows[1:] != rows[:-1], True))[: len(trace)]
    np.testing.assert_array_equal(attempted.load()[last], trace.load())
    first = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))[: len(trace)]
    np.testing.assert_array_equal(attempted.load()[first] - trace.load(), np.where(refused, trace.size, 0))
