"""Accesses of NumPy's arrays joined with the allocations and frees of the serving pool."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import array_programs
import numpy as np
import pytest
from array_calls import same_kind
from hypothesis import given
from hypothesis import strategies as st

import mempool.numpy
from mempool import UsageError
from mempool.demo.network import Data, Network
from mempool.numpy import ArrayPool
from mempool.recording.arrays import ArrayRecorder
from mempool.recording.arrays.pool_recorder import merge_traces, record_arrays
from mempool.recording.arrays.rows import FIELDS
from traces import EventType, Trace, buffers_of
from traces.formats.parquet import read_trace


@pytest.fixture(autouse=True, scope="module")
def _warm_up() -> None:
    """NumPy and others keep arrays of their own from the first use of some functions: not in a pool."""
    Network(np, layers=(784, 20, 10)).step(*Data(np).batch())
    np.median(np.arange(9.0))
    Trace.of([], []).validate()
    gc.collect()


@pytest.fixture
def pool() -> Iterator[ArrayPool]:
    with mempool.numpy.install(background=False) as made:
        yield made
    gc.collect()


def accessed(trace: Trace) -> np.ndarray[Any, Any]:
    return (trace.kind == EventType.READ) | (trace.kind == EventType.WRITE)


def named(trace: Trace, row: int) -> str:
    return trace.names[trace.operation[row]] if trace.operation[row] >= 0 else ""


def train(recorder: ArrayRecorder, pool: ArrayPool, steps: int = 3) -> list[Any]:
    xp = recorder.module(np)
    network, data = Network(xp, layers=(784, 20, 10)), Data(xp)
    losses = []
    for _ in range(steps):
        losses.append(network.step(*data.batch()))
        pool.step()
    recorder.own("parameters", network.parameters)
    return [losses, *network.parameters]


def test_trace_has_all_pool_events_and_every_access(tmp_path: Path) -> None:
    """Allocs, frees and marks equal the pool's own trace file, accesses equal a recording without a pool."""
    file = str(tmp_path / "pool.trace")
    with mempool.numpy.install(background=False, record=file) as pool, ArrayRecorder() as alone:
        expected = train(alone, pool)
    with mempool.numpy.install(background=False) as pool, mempool.numpy.record_arrays() as recorder:
        found = train(recorder, pool)
    trace, of_pool, of_recorder = recorder.trace(), read_trace(file), alone.trace()
    trace.validate()
    assert [same_kind(one) for one in found] == [same_kind(one) for one in expected]
    rest = ~accessed(trace)
    large = trace.size[rest & (trace.kind == EventType.ALLOC) & (trace.size >= 4096)]
    assert large.tolist() == of_pool.size[(of_pool.kind == EventType.ALLOC) & (of_pool.size >= 4096)].tolist()
    assert (trace.kind == EventType.MARK).sum() == 3
    one, other = (
        [(int(t.kind[row]), named(t, row)) for row in np.flatnonzero(accessed(t))]
        for t in (trace, of_recorder)
    )
    assert one == other
    assert trace.metadata["foreign_buffers"] == "0"
    categories = {trace.names[at] for at in trace.category[trace.category >= 0]}
    assert categories == {"parameters"}
    assert (trace.category >= 0).sum() == 4
    assert trace.alignment == 64


def test_temporaries_inside_an_operation_carry_its_name(pool: ArrayPool) -> None:
    with record_arrays(pool) as recorder:
        values = recorder.watch(np.arange(50_000.0))
        np.median(values)
    trace = recorder.trace()
    trace.validate()
    inner = np.flatnonzero((trace.kind == EventType.ALLOC) & (trace.size >= 400_000))
    assert "median" in {named(trace, row) for row in inner}
    untouched = int(trace.metadata["untouched_bytes"])
    assert untouched >= 400_000


def test_buffers_outside_the_pool_come_from_the_recorder(pool: ArrayPool) -> None:
    """Arrays from before the recording, and foreign memory, live from the moment they were watched."""
    before = np.ones(1000)
    with record_arrays(pool) as recorder:
        old, other = recorder.watch(before), recorder.watch(np.frombuffer(bytearray(800)))
        made = old[:100] + other
        del old, other, before
    trace = recorder.trace()
    trace.validate()
    assert trace.metadata["foreign_buffers"] == "2"
    assert (trace.size[trace.kind == EventType.ALLOC] == 8000).sum() == 1
    assert (trace.kind[accessed(trace)] == EventType.READ).sum() == 2
    assert len(made) == 100


@given(array_programs.programs())
def test_any_program_has_the_accesses_of_the_recorder_alone(program: list[Any]) -> None:
    """Buffer by buffer: numbered by their first access, both traces tell the same."""

    def told(trace: Trace) -> list[Any]:
        trace.validate()
        rows, number = np.flatnonzero(accessed(trace)), {}
        return [
            (int(trace.kind[row]), named(trace, row), number.setdefault(int(trace.buffer[row]), len(number)))
            for row in rows
        ]

    with ArrayRecorder() as alone:
        array_programs.run(program, [alone.watch(one) for one in array_programs.start()])
    with mempool.numpy.install(background=False) as pool, record_arrays(pool) as recorder:
        array_programs.run(program, [recorder.watch(one) for one in array_programs.start()])
    assert told(recorder.trace()) == told(alone.trace())


def test_accesses_carry_the_thread_numbers_of_the_pool(pool: ArrayPool) -> None:
    """Accesses and buffers of a thread carry the same number, different for each thread."""
    together = threading.Barrier(3)

    def work() -> None:
        together.wait()
        mine = xp.ones(1000)
        for _ in range(50):
            mine = mine + 1
        together.wait()

    with record_arrays(pool) as recorder:
        xp = recorder.module(np)
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    trace = recorder.trace()
    trace.validate()
    assert len(set(trace.thread[accessed(trace)].tolist())) == 3
    for row in np.flatnonzero(trace.kind == EventType.WRITE):
        assert trace.thread[row] == trace.thread[trace.births[row]]


def test_watched_array_is_not_resized_in_place(pool: ArrayPool) -> None:
    """NumPy refuses the resize while a weak reference exists, so the recorded address stays valid."""
    with record_arrays(pool) as recorder:
        owner = np.ones(1000)
        recorder.touch(owner)
        with pytest.raises(ValueError, match="resize"):
            owner.resize(2_000_000, refcheck=False)


def test_alloc_at_a_reused_address_precedes_the_free_in_the_joined_trace() -> None:
    """For the program both buffers were alive, whatever the clock says."""
    pool = Trace.of([0, 0, 1, 1], [0, 1, 0, 1], [8, 8, 0, 0], time_ns=[1, 5, 4, 9], address=[64, 64, -1, -1])
    table = merge_traces([(0, pool)], Truth([]).seen(), []).table
    assert table["kind"].tolist() == [EventType.ALLOC, EventType.ALLOC, EventType.FREE, EventType.FREE]


def test_access_follows_its_alloc_despite_thread_timing() -> None:
    """When two threads meet an array, the later thread may report the alloc."""
    rows = [(EventType.ALLOC, 0, 8, 7, 7, 0, 64, 0, 0, -1), (EventType.READ, 0, 0, 6, 6, 0, -1, 0, 1, -1)]
    seen = dict(zip(FIELDS, np.array(rows, np.int64).T, strict=True)) | {"category": np.array([-1, -1])}
    table = merge_traces([(0, Trace.of([], []))], seen, []).table
    assert table["kind"].tolist() == [EventType.ALLOC, EventType.READ]


@pytest.mark.parametrize("options", [{"record": "a.trace"}, {"check": True}])
def test_pool_without_array_addresses_and_closed_pool_are_refused(options: dict[str, Any]) -> None:
    refused = pytest.raises(UsageError, match=f"{next(iter(options))}=")
    with mempool.numpy.install(background=False, **options) as pool, refused:
        record_arrays(pool)
    with pytest.raises(UsageError, match="closed"):
        record_arrays(pool)


def test_recorder_without_a_pool_in_use_is_a_plain_array_recorder() -> None:
    assert type(mempool.numpy.record_arrays()) is ArrayRecorder
    with mempool.numpy.install(mode="off") as off:
        assert type(record_arrays(off)) is ArrayRecorder


class Truth:
    """A random history of buffers of the pool and of others at a few addresses, in true order."""

    def __init__(self, choices: list[int]) -> None:
        self.rows: list[dict[str, int]] = []  # with `source`: 0 the pool, 1 the recorder, 2 both
        self.alive: dict[int, tuple[int, bool]] = {}  # address: buffer, whether the recorder knows it
        self.foreign: set[int] = set()  # buffers that are not the pool's, at addresses that may have been
        self.count = self.time = 0
        for choice in choices:
            self.time += 1 + choice % 2
            self.happens(choice // 2 % 4, choice // 8)

    def happens(self, what: int, place: int) -> None:
        address = 64 * (place % 5)
        if address not in self.alive:
            self.alive[address] = self.count, False
            self.foreign |= {self.count} if place >= 7 else set()
            self.row(EventType.ALLOC, self.count, address, size=8 + place)
            self.count += 1
        elif what == 0:
            buffer, known = self.alive.pop(address)
            self.row(EventType.FREE, buffer, address, known=known)
        else:
            buffer, _ = self.alive[address]
            self.alive[address] = buffer, True
            self.row(EventType.READ if what == 1 else EventType.WRITE, buffer, address)

    def row(self, kind: EventType, buffer: int, address: int, size: int = 0, *, known: bool = False) -> None:
        self.rows.append({"kind": kind, "buffer": buffer, "address": address, "size": size,
                          "time": self.time, "known": known})  # fmt: skip

    def of_pool(self) -> Trace:
        kind, buffer, size, time, address = (
            np.array(
                [
                    [row[name] for name in ("kind", "buffer", "size", "time", "address")]
                    for row in self.rows
                    if row["kind"] <= EventType.FREE and row["buffer"] not in self.foreign
                ],
                np.int64,
            )
            .reshape(-1, 5)
            .T
        )
        address = np.where(kind == EventType.ALLOC, address, -1)
        return Trace.of(kind, buffer, size, time_ns=time, address=address)

    def seen(self) -> dict[str, Any]:
        """Return the recorder's events: other numbers, allocs at the first access, frees of known buffers."""
        table, number = [], {}
        for row in self.rows:
            kind, buffer, time = row["kind"], row["buffer"], row["time"]
            if kind >= EventType.READ and buffer not in number:
                number[buffer] = len(number)
                size = next(one["size"] for one in self.rows if one["buffer"] == buffer)
                table.append((EventType.ALLOC, number[buffer], size, time, -1, -1, row["address"], 0, 0, -1))
            if kind >= EventType.READ or (kind == EventType.FREE and row["known"]):
                table.append((kind, number[buffer], 0, time, -1, -1, -1, 0, 0, -1))
        columns = np.array(table, np.int64).reshape(-1, len(FIELDS)).T
        return dict(zip(FIELDS, columns, strict=True)) | {"category": np.full(len(table), -1)}

    def expected(self) -> list[tuple[int, int, int]]:
        """Return kind, buffer size and time of each event; a foreign buffer begins with the first access."""
        told, known = [], set()
        for row in self.rows:
            size = next(one["size"] for one in self.rows if one["buffer"] == row["buffer"])
            if row["buffer"] in self.foreign and row["kind"] == EventType.ALLOC:
                continue
            if row["buffer"] in self.foreign and row["kind"] == EventType.FREE and not row["known"]:
                continue
            if row["buffer"] in self.foreign and row["buffer"] not in known and row["kind"] >= EventType.READ:
                known.add(row["buffer"])
                told.append((EventType.ALLOC, size, row["time"]))
            told.append((row["kind"], size, row["time"]))
        return told


@given(st.lists(st.integers(0, 79), max_size=60))
def test_join_restores_the_true_order_of_events(choices: list[int]) -> None:
    """A known history with reused addresses, split into the views of a pool and a recorder."""
    truth = Truth(choices)
    table = merge_traces([(0, truth.of_pool())], truth.seen(), []).table
    columns = {name: values for name, values in table.items() if name not in ("began", "address")}
    joined = Trace.of(**columns)
    joined.validate()
    sizes = joined.size[joined.births] if len(joined) else joined.size
    assert (
        list(zip(joined.kind.tolist(), sizes.tolist(), joined.time_ns.tolist(), strict=True))
        == truth.expected()
    )
    assert len(buffers_of(joined)) == (joined.kind == EventType.ALLOC).sum()
