"""Traces and their transforms."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces import Buffers, EventType, Trace, TraceError, workload
from traces.read import read
from traces.trace import COLUMNS
from traces.transforms import pools_as_streams, refused_as_buffers, trace_of_buffers, without_contradictions

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
    trace = Trace.of([A, F], [0, 0], [8, 0], names=["x"], metadata={"alignment": "64"}, device=3)
    assert trace.alignment == 64
    assert trace.device.strides == trace.stream.strides == (0,)  # constants take the memory of one value
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


def test_on_device_keeps_events_of_the_device_and_all_marks() -> None:
    trace = Trace.of([M, A, A, SEGMENTS[0], F], [-1, 0, 1, -1, 0], [0, 8, 9, 64, 0], device=[5, 0, 2, 2, 0])
    assert trace.devices == (0, 2)
    assert trace.on_device(0).kind.tolist() == [M, A, F]
    assert trace.on_device(2).size.tolist() == [0, 9, 64]
    assert trace.on_device(2).device.tolist() == [2, 2, 2]


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


ROWS = st.lists(
    st.tuples(st.sampled_from([*EventType, 9]), st.integers(-1, 3), st.integers(-1, 5)), max_size=30
)


@given(ROWS)
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


def between_marks(trace: Trace) -> list[tuple[int, int]]:
    marks = np.flatnonzero(trace.kind == EventType.MARK).tolist()
    return list(itertools.pairwise(marks))


@settings(max_examples=25)
@given(st.integers(9, 400), st.integers(0, 9), st.integers(1, 4), st.booleans(), st.sampled_from([0.0, 0.5]))
def test_iterations_have_the_requested_buffers_and_all_but_the_first_are_alike(
    n: int, seed: int, iterations: int, accesses: bool, replaced: float
) -> None:
    trace = workload.generate(n, seed, iterations=iterations, accesses=accesses, replaced=replaced)
    trace.validate()
    windows = between_marks(trace)
    assert len(windows) == iterations
    shapes = [(trace.kind[a:b].tolist(), trace.size[a:b].tolist()) for a, b in windows]
    assert all(shape == shapes[1] for shape in shapes[2:])
    for kinds, _ in shapes[1:]:
        assert kinds.count(EventType.ALLOC) == n
        assert kinds.count(EventType.FREE) == n


def steady_load(buffers: Buffers) -> np.ndarray:
    """Return the bytes alive after each event of a steady iteration, every instance counted."""
    assert buffers.period is not None
    change = np.zeros(buffers.period, np.int64)
    np.add.at(change, buffers.start, buffers.size)
    np.subtract.at(change, buffers.end % buffers.period, buffers.size)
    at_start = (buffers.size * (buffers.end // buffers.period)).sum()
    return np.cumsum(change) + at_start


@pytest.mark.parametrize("replaced", [0.0, 0.5])
def test_buffers_match_the_repeating_part_of_the_trace(replaced: float) -> None:
    n = 500
    trace = workload.generate(n, 3, iterations=4, replaced=replaced)
    buffers = workload.buffers(n, 3, replaced=replaced)
    assert len(buffers.select(~buffers.persistent)) == n
    first, last = between_marks(trace)[-1]
    load = trace.load()[first + 1 : last]
    state = buffers.size[buffers.persistent].sum()
    np.testing.assert_array_equal(load - state, steady_load(buffers.select(~buffers.persistent)))


def test_trace_depends_on_the_seed_only() -> None:
    one, same, other = (workload.generate(200, seed) for seed in (1, 1, 2))
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(one, name), getattr(same, name))
    assert one.size.tolist() != other.size.tolist()
