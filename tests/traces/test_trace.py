"""Properties of traces: immutable columns, possible events."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import EventType, Trace, TraceError
from traces.trace import COLUMNS

A, F, R, W, M, *SEGMENTS = EventType
EVENTS = st.lists(
    st.tuples(st.sampled_from(list(EventType)), st.integers(-1, 4), st.integers(-1, 9)),
    max_size=14,
)


def first_fault_by_hand(events: list[tuple[EventType, int, int]]) -> int | None:
    """Return the first row that is impossible in itself, else the first that contradicts an earlier row."""
    for row, (kind, buffer, size) in enumerate(events):
        sized = kind in (A, *SEGMENTS)
        if size < 0 or (not sized and size) or (buffer != -1) != (kind < M) or (kind >= M and buffer != -1):
            return row
    born: set[int] = set()
    dead: set[int] = set()
    for row, (kind, buffer, _) in enumerate(events):
        if kind >= M:
            continue
        if (buffer in born) if kind == A else (buffer not in born or buffer in dead):
            return row
        (born if kind == A else dead if kind == F else set[int]()).add(buffer)
    return None


def trace_of(events: list[tuple[EventType, int, int]]) -> Trace:
    table = np.array(events, np.int64).reshape(-1, 3)
    return Trace.of(*table.T)


@given(EVENTS)
def test_validate_finds_the_same_row_as_a_loop_over_the_events(
    events: list[tuple[EventType, int, int]],
) -> None:
    row = first_fault_by_hand(events)
    trace = trace_of(events)
    if row is None:
        trace.validate()
        return
    with pytest.raises(TraceError) as caught:
        trace.validate()
    assert caught.value.row == row


@st.composite
def possible(draw: st.DrawFn) -> list[tuple[EventType, int, int]]:
    events: list[tuple[EventType, int, int]] = []
    alive: list[int] = []
    for _ in range(draw(st.integers(0, 20))):
        kind = draw(st.sampled_from([A, A, F, R, W, M, *SEGMENTS]))
        if kind in (F, R, W) and not alive:
            continue
        if kind == A:
            alive.append(len(events))
            events.append((A, len(events), draw(st.integers(0, 100))))
        elif kind >= M:
            events.append((kind, -1, 0 if kind == M else draw(st.integers(0, 100))))
        else:
            buffer = draw(st.sampled_from(alive))
            events.append((kind, buffer, 0))
            if kind == F:
                alive.remove(buffer)
    return events


@given(possible())
def test_load_is_the_sum_of_living_sizes(events: list[tuple[EventType, int, int]]) -> None:
    alive: dict[int, int] = {}
    expected = []
    for kind, buffer, size in events:
        if kind == A:
            alive[buffer] = size
        elif kind == F:
            del alive[buffer]
        expected.append(sum(alive.values()))
    assert trace_of(events).load().tolist() == expected


@given(possible(), st.integers(0, 20), st.integers(0, 20))
def test_window_is_a_valid_trace_of_buffers_allocated_inside(
    events: list[tuple[EventType, int, int]], start: int, stop: int
) -> None:
    window = trace_of(events)[start:stop]
    window.validate()
    born = {buffer for kind, buffer, _ in events[start:stop] if kind == A}
    kept = [event for event in events[start:stop] if event[0] >= M or event[1] in born]
    rows = zip(window.kind, window.buffer, window.size, strict=True)
    assert [tuple(map(int, row)) for row in rows] == kept


@pytest.mark.parametrize(
    ("columns", "row", "reason"),
    [
        ({"kind": [9], "buffer": [0]}, 0, "unknown kind"),
        ({"kind": [A], "buffer": [0], "size": [2**62 + 1]}, 0, "beyond 2\\*\\*62"),
        ({"kind": [A, A, A], "buffer": [0, 1, 2], "size": 2**62}, 1, "more than"),
        ({"kind": [A], "buffer": [0], "operation": [0]}, 0, "operation"),
        ({"kind": [A], "buffer": [0], "frame": [-2]}, 0, "frame"),
        ({"kind": [A], "buffer": [0], "module": [0]}, 0, "module"),
        ({"kind": [A, F], "buffer": [0, 0], "category": [-1, 0], "names": ["x"]}, 1, "category"),
        ({"kind": [A], "buffer": [0], "address": [-2]}, 0, "negative address"),
        ({"kind": [A, F], "buffer": [0, 0], "address": [64, 64]}, 1, "only an alloc has an address"),
        ({"kind": [A], "buffer": [0], "thread": [-1]}, 0, "thread"),
        ({"kind": [A], "buffer": [0], "thread": [2_000_000_000]}, 0, "thread"),
        ({"kind": [A, F, F], "buffer": [7, 7, 7]}, 2, "free of buffer 7 after its free"),
        ({"kind": [R, A], "buffer": [7, 7]}, 0, "read of buffer 7 before its alloc"),
        ({"kind": [A, F, A], "buffer": [7, 7, 7]}, 2, "second time"),
    ],
)
def test_impossible_event_is_reported_with_the_row(columns: dict, row: int, reason: str) -> None:
    with pytest.raises(TraceError, match=reason) as caught:
        Trace.of(**columns).validate()
    assert caught.value.row == row
    assert str(caught.value).startswith(f"row {row}: ")


@pytest.mark.parametrize("text", ["0", "3", "-8", "eight", "", "9" * 5000, "٢"])
def test_alignment_must_be_a_power_of_two(text: str) -> None:
    with pytest.raises(TraceError, match="alignment"):
        Trace.of([], [], metadata={"alignment": text}).validate()


def test_columns_are_read_only_in_the_original_and_in_copies() -> None:
    trace = Trace.of([A, F], [0, 0], [8, 0], names=["x"], metadata={"alignment": "64"})
    assert trace.alignment == 64
    for one in (trace, trace[:1], copy.deepcopy(trace), pickle.loads(pickle.dumps(trace))):
        assert one.metadata == trace.metadata
        for name, dtype in COLUMNS.items():
            column = getattr(one, name)
            assert column.dtype == dtype
            assert not column.flags.writeable
        with pytest.raises(TypeError):
            one.metadata["alignment"] = "1"


@pytest.mark.parametrize(
    "columns",
    [
        {"kind": [A, F], "buffer": [0]},
        {"kind": [[A]], "buffer": [0]},
        {"kind": [0.5], "buffer": [0]},
        {"kind": [300], "buffer": [0]},
        {"kind": [-1], "buffer": [0]},
        {"kind": [A], "buffer": [2**63]},
        {"kind": [A], "buffer": ["0"]},
    ],
)
def test_columns_of_another_shape_or_type_are_refused(columns: dict) -> None:
    with pytest.raises(TraceError):
        Trace.of(**columns)


@pytest.mark.parametrize("window", [0, slice(None, None, 2), slice(None, None, -1)])
def test_a_trace_is_cut_by_plain_slices_only(window: object) -> None:
    with pytest.raises(TypeError):
        Trace.of([A], [0])[window]


def test_on_device_keeps_events_of_the_device_and_all_marks() -> None:
    trace = Trace.of([M, A, A, SEGMENTS[0], F], [-1, 0, 1, -1, 0], [0, 8, 9, 64, 0], device=[5, 0, 2, 2, 0])
    assert trace.devices == (0, 2)
    assert trace.on_device(0).kind.tolist() == [M, A, F]
    assert trace.on_device(2).size.tolist() == [0, 9, 64]
    assert trace.on_device(2).device.tolist() == [2, 2, 2]
