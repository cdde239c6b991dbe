"""Recordings and traces in memory and on disk."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cores import Core
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mempool._core import EVENT_FIELDS, TraceNames
from mempool.recording.events import RECORD, EventConverter
from traces.trace import EventType

ALLOC, FREE, HANDOVER, USE, STEP, BEGIN, END, FOUND = 0, 1, 2, 3, 4, 5, 6, 12
OF_BRIEF = ("address", "size", "sequence", "kind")
BRIEF = np.dtype([(name, kind) for name, kind in EVENT_FIELDS if name in OF_BRIEF])
STREAMS = [70, 80, 90]  # of each sequence
EVENTS = st.lists(
    st.tuples(
        st.sampled_from([ALLOC, ALLOC, ALLOC, FREE, FREE, HANDOVER, USE, STEP, BEGIN, END, FOUND]),
        st.sampled_from([64, 128, 192, 2**47]),
        st.sampled_from([1, 1000, 2**40]),
        st.integers(0, 2),
    ),
    max_size=40,
)


def records(events: list[tuple[int, int, int, int]]) -> NDArray[Any]:
    """Records with times of their own, by streams of their own."""
    made = np.zeros(len(events), RECORD)
    for n, (kind, address, size, sequence) in enumerate(events):
        made[n] = (n, address, size if kind == ALLOC else 0, 10 * n, -n, sequence, kind)
    return made


def expected_rows(
    events: NDArray[Any], alive: dict[int, int], buffer_numbers: itertools.count[int]
) -> list[tuple[int, ...]]:
    """Return (kind, buffer, size, stream, thread, time, operation, address) of each row."""
    named = []
    for event in events:
        kind, address = int(event["kind"]), int(event["address"])
        if kind == ALLOC:
            alive[address] = next(buffer_numbers)
        buffer = alive.get(address, -1) if kind <= USE else -1
        if kind in (FREE, HANDOVER):
            alive.pop(address, None)
        named.append((event, buffer))
    order = list(range(len(named)))
    for n in range(len(named) - 1):
        if named[n][0]["kind"] == HANDOVER and named[n + 1][0]["kind"] == ALLOC:
            order[n], order[n + 1] = n + 1, n
    rows = []
    for when, n in enumerate(order):
        event, buffer = named[n]
        kind = int(event["kind"])
        row = {
            ALLOC: EventType.ALLOC,
            FREE: EventType.FREE,
            HANDOVER: EventType.FREE,
            USE: EventType.READ,
        }.get(kind, EventType.MARK)
        if buffer < 0 and row != EventType.MARK:
            continue
        operation = {STEP: 0, BEGIN: 1, END: 2, FOUND: 3}.get(kind, -1)
        size, address = (event["size"], event["address"]) if kind == ALLOC else (0, -1)
        own = (size, event["stream"], event["sequence"], events[when]["time_ns"], operation, address)
        rows.append((int(row), buffer, *map(int, own)))
    return rows


@given(EVENTS, st.lists(st.integers(0, 40), max_size=3))
def test_rows_equal_the_events(events: list[tuple[int, int, int, int]], cuts: list[int]) -> None:
    """The records arrive in any pieces; a handover at a piece's end is a free, before the next event."""
    made = records(events)
    recording = EventConverter(64, addresses=True)
    alive, buffer_numbers = dict[int, int](), itertools.count()
    for begin, end in itertools.pairwise(sorted({0, len(made), *(min(cut, len(made)) for cut in cuts)})):
        trace = recording.trace(made[begin:end].tobytes())
        columns = trace.kind, trace.buffer, trace.size, trace.stream, trace.thread
        columns += trace.time_ns, trace.operation, trace.address
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        assert rows == expected_rows(made[begin:end], alive, buffer_numbers)
        assert trace.names == ("step", "begin", "end", "optimizer step")
        assert trace.alignment == 64


@given(EVENTS)
def test_brief_records_have_the_stream_of_their_sequence_and_no_time(
    events: list[tuple[int, int, int, int]],
) -> None:
    made = records(events)
    convert_brief = np.zeros(len(made), BRIEF)
    for name in OF_BRIEF:
        convert_brief[name] = made[name]
    used = made["kind"] == USE
    convert_brief["size"][used] = np.arange(used.sum())
    made["time_ns"] = 0
    made["stream"] = np.where(made["kind"] < USE, np.array(STREAMS)[made["sequence"]], 0)
    made["stream"][used] = np.arange(used.sum())
    trace = EventConverter(64).convert_brief(convert_brief.view(np.uint8), STREAMS)
    columns = trace.kind, trace.buffer, trace.size, trace.stream, trace.thread, trace.time_ns, trace.operation
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    assert rows == [row[:-1] for row in expected_rows(made, {}, itertools.count())]
    assert (trace.address == -1).all()


def test_truncated_record_and_sequence_without_a_stream_are_refused() -> None:
    one = records([(ALLOC, 64, 1000, 2)])
    with pytest.raises(ValueError, match="a part of a record"):
        TraceNames().rows(one.tobytes()[:-1])
    convert_brief = np.zeros(1, BRIEF)
    convert_brief["sequence"] = 2
    with pytest.raises(ValueError, match="a part of a record"):
        TraceNames().brief_rows(convert_brief.tobytes()[1:], STREAMS)
    with pytest.raises(IndexError):
        TraceNames().brief_rows(convert_brief.tobytes(), STREAMS[:2])


@pytest.mark.parametrize("piece", [1, 7, 64, 10_000])
def test_tape_on_disk_equals_the_tape_in_memory(tmp_path: Path, piece: int) -> None:
    cores = [Core(), Core()]
    cores[0].client.set_tracing(True)
    cores[1].client.set_tracing(True, folder=str(tmp_path), piece=piece)
    taken: list[list[np.ndarray]] = [[], []]

    def take() -> None:
        for core, kept in zip(cores, taken, strict=True):
            while packed := core.client.take_trace():
                kept.append(np.frombuffer(packed, RECORD))

    rng = random.Random(piece)
    for _ in range(1000):
        size = rng.randrange(1, 5000)
        for core in cores:
            core.free(core.allocate(size))
        if rng.random() < 0.03:
            take()
    take()
    assert list(tmp_path.iterdir()) == []  # it has no name
    memory, file = (np.concatenate(kept) for kept in taken)
    assert len(file) == 2000
    assert max(map(len, taken[1])) <= piece
    np.testing.assert_array_equal(file["index"], np.arange(2000))
    for name in ("kind", "size", "stream", "sequence"):
        np.testing.assert_array_equal(file[name], memory[name])
    assert cores[1].client.state()["trace_lost"] == 0


def test_program_with_allocations_only_is_recorded_in_bounded_memory(tmp_path: Path) -> None:
    """Nobody writes the trace meanwhile: waiting records are in the file."""
    program = """if True:
        import os, sys, numpy as np
        from mempool import _core
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        device = _core.SimulatedDevice()
        client = _core.Client(_core.Pool(device=device), "test")
        client.set_tracing(True, folder=sys.argv[1])
        allocate, free = client.allocate, client.free
        for k in range(1_500_000):
            free(allocate(1000))
            if k == 200_000: before = resident()
        print(resident() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 24 << 20  # two pieces; in memory it would be 140 MiB
