"""Simulations read off a trace: the recorded allocator's own behaviour."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from simulations import check_simulation, event_traces

from solvers.simulators import Simulation, simulate
from solvers.simulators.recorded import recorded
from traces import EventType, Trace
from traces.formats.snapshot import read_snapshot

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHARED = Path(__file__).parents[3] / "shared" / "bench" / "pytorch_snapshots"


def as_recorded(simulation: Simulation) -> tuple[Trace, NDArray[np.int64]]:
    """Return the trace written by a recorder of the allocator, and the rows of the simulation's events."""
    trace, segments = simulation.trace, simulation.segments
    rows = [
        (int(trace.kind[k]), int(trace.buffer[k]), int(trace.size[k]), int(simulation.address[k]), k, 1)
        for k in range(len(trace))
    ]
    for k in range(len(segments)):
        at, size = int(segments.address[k]), int(segments.size[k])
        rows.append((EventType.RESERVE, -1, size, at, int(segments.start[k]), 0))
        if segments.end[k] < len(trace):
            rows.append((EventType.RELEASE, -1, size, at, int(segments.end[k]), 0))
    rows.sort(key=lambda row: row[4:])
    kind, buffer, size, address, _, own = np.array(rows, np.int64).reshape(-1, 6).T
    written = Trace.of(kind, buffer, size, address=address, metadata={"alignment": "512", "expandable": "1"})
    return written, np.flatnonzero(own)


@settings(max_examples=60, deadline=None)
@given(trace=event_traces())
def test_recorded_simulation_reproduces_the_allocator(trace: Trace) -> None:
    """Addresses, live and reserved bytes, and segments equal the allocator's, here first fit."""
    made = simulate(trace, "first_fit")
    written, own = as_recorded(made)
    found = recorded(written)
    if not len(made.segments):
        assert found is None
        return
    assert found is not None
    check_simulation(found)
    for name in ("address", "live", "reserved"):
        assert getattr(found, name)[own].tolist() == getattr(made, name).tolist()
    assert found.segments.size.tolist() == made.segments.size.tolist()
    assert found.driver_calls == made.driver_calls


def test_segment_released_in_its_middle_keeps_both_ends() -> None:
    """An expandable segment, for example: the rest stays reserved, and adjacent parts stay one range."""
    kind = [EventType.RESERVE, EventType.RESERVE, EventType.RELEASE]
    trace = Trace.of(kind, -1, [1024, 512, 1024], address=[0, 1024, 256], metadata={"expandable": "1"})
    found = recorded(trace)
    assert found is not None
    assert found.reserved.tolist() == [1024, 1536, 512]
    s = found.segments
    rows = np.column_stack([s.address, s.size, s.start, s.end, s.region]).tolist()
    assert sorted(rows) == [
        [0, 256, 0, 3, 0],
        [256, 768, 0, 2, 0],
        [1024, 256, 1, 2, 0],
        [1280, 256, 1, 3, 0],
    ]


def test_trace_without_segments_or_addresses_has_no_recorded_simulation() -> None:
    assert recorded(Trace.of([EventType.ALLOC], [0], [8], address=[0])) is None
    assert (
        recorded(Trace.of([EventType.RESERVE, EventType.ALLOC], [-1, 0], [512, 8], address=[0, -1])) is None
    )


def test_buffer_outside_reserved_memory_invalidates_the_recorded_simulation() -> None:
    """Segments of a recording without beginning or end tell nothing about the memory."""
    kind = [EventType.RESERVE, EventType.RESERVE, EventType.ALLOC, EventType.ALLOC]
    for address, known in ((600, True), (1000, False), (1100, False), (2100, False)):
        trace = Trace.of(kind, [-1, -1, 0, 1], [1024, 512, 8, 200], address=[0, 1536, 0, address])
        assert (recorded(trace) is not None) == known
    later = Trace.of([EventType.ALLOC, EventType.RESERVE], [0, -1], [8, 512], address=[0, 0])
    assert recorded(later) is None


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared snapshots are not here")
@pytest.mark.parametrize(
    "name",
    ["small", pytest.param("transformer_ctx128_fullstep", marks=pytest.mark.full)],
)
def test_real_recording_keeps_the_invariants_of_all_allocators(name: str) -> None:
    found = recorded(read_snapshot(SHARED / f"{name}.pickle"))
    assert found is not None
    check_simulation(found)
