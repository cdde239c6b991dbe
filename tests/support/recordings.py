"""Recordings made of simulations, as a reader of snapshots gives them: whole, or from the middle on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from traces.trace import EventType, Trace

if TYPE_CHECKING:
    from solvers.simulators import Simulation

Row = tuple[int, int, int, int, int, int]


def recording_of(simulation: Simulation, begin: int = 0, shift: int = 0) -> Trace:
    """What a recorder that was switched on before event `begin` tells; addresses are higher by `shift`."""
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
    """Segments, then buffers, that are there when the recorder is switched on."""
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
