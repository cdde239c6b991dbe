"""Recordings made of simulations, and random traces for them."""

from __future__ import annotations

import bisect

import numpy as np
from hypothesis import strategies as st

from solvers.simulators import Simulation
from traces.trace import EventType, Trace

MIB = 1 << 20
#: Sizes around the thresholds of allocators.
SIZES = (0, 1, 511, 512, 513, 4096, MIB - 1, MIB, MIB + 1, 2 * MIB, 5 * MIB, 10 * MIB, 20 * MIB, 300 * MIB)


@st.composite
def event_traces(draw: st.DrawFn, most: int = 60) -> Trace:
    """Draw up to `most` allocs on three streams, some freed at once, late or never, and a few marks."""
    size = st.sampled_from(SIZES) | st.integers(0, 3 * MIB) | st.integers(0, 2048)
    step = st.one_of(
        st.tuples(st.just(EventType.ALLOC), size, st.integers(0, 2)),
        st.tuples(st.just(EventType.FREE), st.integers(0, 1 << 30), st.integers(0, 2)),
        st.tuples(st.just(EventType.MARK), st.just(0), st.just(0)),
    )
    return trace_of(draw(st.lists(step, max_size=2 * most)))


def random_trace(seed: int, events: int, largest: int = 8 * MIB) -> Trace:
    """Return random allocs and frees of sizes of all magnitudes, with some hundreds of live buffers."""
    random = np.random.default_rng(seed)
    alloc = random.random(events) < np.where(np.arange(events) < 400, 0.9, 0.5)
    size = np.exp(random.uniform(0, np.log(largest), events)).astype(np.int64)
    number = np.where(alloc, size, random.integers(0, 1 << 30, events))
    kind = np.where(alloc, EventType.ALLOC, EventType.FREE)
    return trace_of(
        list(zip(kind.tolist(), number.tolist(), random.integers(0, 3, events).tolist(), strict=True))
    )


def trace_of(steps: list[tuple[int, int, int]]) -> Trace:
    """Return a trace of steps (kind, size or number of the live buffer to free, stream)."""
    rows: list[tuple[int, int, int, int]] = []
    alive: list[int] = []
    buffers = 0
    for kind, number, stream in steps:
        if kind == EventType.ALLOC:
            alive.append(buffers)
            rows.append((kind, buffers, number, stream))
            buffers += 1
        elif kind == EventType.FREE and alive:
            rows.append((kind, alive.pop(number % len(alive)), 0, stream))
        elif kind == EventType.MARK:
            rows.append((kind, -1, 0, 0))
    table = np.array(rows, np.int64).reshape(-1, 4)
    return Trace.of(table[:, 0], table[:, 1], table[:, 2], stream=table[:, 3])


def check_simulation(simulation: Simulation, limit_bytes: int | None = None) -> None:
    """Assert the invariants of every allocator, in quadratic time."""
    trace, segments = simulation.trace, simulation.segments
    assert len(simulation.address) == len(simulation.live) == len(simulation.reserved) == len(trace)
    lasting = _lasting(simulation) and len(trace) > 0
    assert ((segments.start < segments.end) & (segments.size > 0)).all() or not lasting
    assert (segments.end <= len(trace)).all()
    blocks: dict[int, tuple[int, int, int]] = {}  # by buffer: its address, bytes in use, bytes requested
    live, failed = 0, []
    for event in range(len(trace)):
        buffer, now = int(trace.buffer[event]), int(simulation.live[event])
        if trace.kind[event] == EventType.ALLOC:
            address, size = int(simulation.address[event]), int(trace.size[event])
            if address >= 0:
                blocks[buffer] = (address, now - live, size)
                assert now - live >= size, "a block smaller than what was requested"
                live = now
            elif size > 0:
                failed.append(event)
        else:
            assert simulation.address[event] == -1
            if trace.kind[event] == EventType.FREE and buffer in blocks:
                live -= blocks.pop(buffer)[1]
        assert now == live, "live bytes are not those of the blocks"
        held = _held(simulation, event)
        assert simulation.reserved[event] == sum(end - start for start, end, _ in held)
        assert live <= simulation.reserved[event]
        assert limit_bytes is None or simulation.reserved[event] <= limit_bytes
        _check_places(sorted(blocks.values()), held)
    assert simulation.failed_at == (failed[0] if failed else None)
    assert not failed or limit_bytes is not None
    assert 0 <= simulation.largest_free_bytes <= simulation.peak_reserved_bytes


def _lasting(simulation: Simulation) -> bool:
    """Return false if a segment may come and go within one event, as when memory runs out."""
    return simulation.failed_at is None


def _held(simulation: Simulation, event: int) -> list[tuple[int, int, int]]:
    """Return ranges held after an event as (start, end, region), adjacent ranges of a region merged."""
    segments = simulation.segments
    rows = np.flatnonzero((segments.start <= event) & (event < segments.end))
    merged: list[tuple[int, int, int]] = []
    for row in rows[np.argsort(segments.address[rows])]:
        start, region = int(segments.address[row]), int(segments.region[row])
        end = start + int(segments.size[row])
        assert not merged or start >= merged[-1][1], "two segments overlap"
        if merged and merged[-1][1:] == (start, region):
            start = merged.pop()[0]
        merged.append((start, end, region))
    return merged


def _check_places(blocks: list[tuple[int, int, int]], held: list[tuple[int, int, int]]) -> None:
    below = 0
    for address, size, _ in blocks:
        assert address >= below, "two blocks overlap"
        below = address + size
        at = bisect.bisect_right(held, (address, 1 << 62, 1 << 62)) - 1
        assert at >= 0, "a block below all segments"
        assert below <= held[at][1], "a block outside the segments"


Row = tuple[int, int, int, int, int, int]


def recording_of(simulation: Simulation, begin: int = 0, shift: int = 0) -> Trace:
    """Return the trace of a recorder switched on before event `begin`; addresses are shifted by `shift`."""
    trace, segments = simulation.trace, simulation.segments
    rows: list[Row] = []
    for event in range(begin, len(trace)):
        for kind, when in ((EventType.RELEASE, segments.end), (EventType.RESERVE, segments.start)):
            rows += [
                (kind, -1, segments.size[k], segments.stream[k], segments.address[k], event)
                for k in np.flatnonzero(when == event)
            ]
        rows.append(_event(simulation, event))
    before = _before(simulation, begin)
    table = np.array(before + rows, np.int64).reshape(-1, 6)
    kind, buffer, size, stream, address, time = table.T
    alive = sum(row[0] == EventType.ALLOC for row in before)
    return Trace.of(
        kind,
        buffer,
        size,
        stream=stream,
        address=np.where(address >= 0, address + shift, -1),
        time_ns=time,
        metadata={"alive_before": str(alive)},
    )


def _event(simulation: Simulation, event: int) -> Row:
    trace = simulation.trace
    columns = (trace.kind, trace.buffer, trace.size, trace.stream, simulation.address)
    kind, buffer, size, stream, address = (int(column[event]) for column in columns)
    return kind, buffer, size, stream, address, event


def _before(simulation: Simulation, begin: int) -> list[Row]:
    """Return the segments, then the buffers, that exist when the recorder is switched on."""
    trace, segments = simulation.trace, simulation.segments
    held = np.flatnonzero((segments.start < begin) & (segments.end >= begin))
    held = held[np.argsort(segments.address[held])]
    rows: list[Row] = [
        (EventType.RESERVE, -1, segments.size[k], segments.stream[k], segments.address[k], begin)
        for k in held
    ]
    freed = set(trace.births[:begin][trace.kind[:begin] == EventType.FREE].tolist())
    allocs = np.flatnonzero(trace.kind[:begin] == EventType.ALLOC).tolist()
    return rows + [(*_event(simulation, row)[:5], begin) for row in allocs if row not in freed]
