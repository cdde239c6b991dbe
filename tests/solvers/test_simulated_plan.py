"""The plan of a whole trace among the simulated allocators."""

from __future__ import annotations

import numpy as np
import pytest
from simulations import MIB, check_simulation, random_trace, trace_of

from solvers import solve
from solvers.packing.plan import Stop
from solvers.simulators import simulate
from traces.buffers import buffers_of
from traces.errors import TraceError
from traces.trace import EventType, Trace

A, F = int(EventType.ALLOC), int(EventType.FREE)


def test_planned_allocator_beats_online_allocators() -> None:
    """A plan knows which small buffers stay, and puts them where no large buffer must be."""
    steps = [step for _ in range(8) for step in ((A, MIB, 0), (A, 512, 0))]
    steps += [(F, k, 0) for k in range(8)] + [(A, 8 * MIB, 0)]  # what is left is every second: the small ones
    planned, online = (simulate(trace_of(steps), name) for name in ("planned", "best_fit"))
    check_simulation(planned)
    assert planned.peak_reserved_bytes == int(planned.trace.load().max()) < online.peak_reserved_bytes
    assert planned.driver_calls == 1
    assert (planned.reserved == planned.peak_reserved_bytes).all()


def test_planned_allocator_uses_the_offsets_of_solve() -> None:
    trace = random_trace(5, 600)
    simulation = simulate(trace, "planned", alignment_bytes=256, nodes=1000)
    buffers = buffers_of(trace)
    rounded = -(-buffers.size // 256) * 256
    assert int(simulation.live.max()) <= int(rounded.sum())
    rows = np.flatnonzero(trace.kind == EventType.ALLOC)
    offset = simulation.address[rows] - simulation.segments.address[0]
    assert (offset[buffers.size > 0] % 256 == 0).all()
    plan = solve(buffers_of(trace, alignment=256), stop=Stop(nodes=1000), solver="search")
    assert simulation.peak_reserved_bytes <= plan.arena_bytes * 1.05


def test_planned_streams_share_nothing() -> None:
    """Two streams' buffers lie apart, though the first is freed before the second is allocated."""
    simulation = simulate(trace_of([(A, MIB, 0), (F, 0, 0), (A, MIB, 1)]), "planned")
    assert simulation.peak_reserved_bytes == 2 * MIB


def test_plan_beyond_the_device_is_cut_off() -> None:
    """A plan that needs more than the live bytes, as with two streams, ends with the device."""
    steps = [(A, 2 * MIB, 0), (F, 0, 0), (A, 2 * MIB, 1), (F, 0, 0), (A, MIB, 0)]
    simulation = simulate(trace_of(steps), "planned", limit_bytes=3 * MIB)
    check_simulation(simulation, 3 * MIB)
    assert simulation.failed_at is not None
    assert simulation.peak_reserved_bytes == 3 * MIB


def test_byte_sums_beyond_int64_are_refused() -> None:
    count = 300
    trace = Trace.of(np.zeros(count, np.uint8), np.arange(count), 1 << 56)
    with pytest.raises(TraceError, match=r"2\*\*62"):
        simulate(Trace.of([0, 1] * count, np.repeat(np.arange(count), 2), [1 << 56, 0] * count), "planned")
    assert simulate(trace, "planned").failed_at == 1
    assert simulate(trace, "planned", limit_bytes=1 << 30).failed_at == 0
