"""Invariants of every simulated allocator: buffers are disjoint and within reserved memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import MIB, check_simulation, event_traces, random_trace, trace_of

from solvers import _core
from solvers.simulators import ALLOCATORS, Simulation, simulate
from traces.errors import TraceError
from traces.trace import EventType, Trace

every = pytest.mark.parametrize("allocator", ALLOCATORS)


@every
@settings(max_examples=60, deadline=None)
@given(trace=event_traces())
def test_buffers_are_disjoint_and_within_reserved_memory(allocator: str, trace: Trace) -> None:
    """Without a limit each buffer gets separate memory, and requested <= live <= reserved at all times."""
    check_simulation(simulate(trace, allocator))


@every
@settings(max_examples=60, deadline=None)
@given(trace=event_traces(), limit=st.sampled_from([0, 512, 2, 20, 24, 41, 64, 400]))
def test_limit_is_kept(allocator: str, trace: Trace, limit: int) -> None:
    """Reserved memory never exceeds the limit, failures are reported, and the rest is served in order."""
    limit_bytes = limit * MIB if limit < 512 else limit
    check_simulation(simulate(trace, allocator, limit_bytes=limit_bytes), limit_bytes)


@every
def test_long_traces_keep_the_invariants(allocator: str) -> None:
    trace = random_trace(1, 1500)
    simulation = simulate(trace, allocator)
    check_simulation(simulation)
    limit_bytes = int(trace.load().max()) * 3 // 4
    tight = simulate(trace, allocator, limit_bytes=limit_bytes)
    check_simulation(tight, limit_bytes)
    assert tight.failed_at is not None


@every
def test_simulation_is_deterministic(allocator: str) -> None:
    trace = random_trace(2, 3000)
    one, two = (simulate(trace, allocator) for _ in range(2))
    for name in ("address", "live", "reserved"):
        assert (getattr(one, name) == getattr(two, name)).all()
    assert (one.segments.address == two.segments.address).all()
    assert one.driver_calls == two.driver_calls


@every
def test_fragmentation_of_zero_byte_requests_is_zero_or_whole(allocator: str) -> None:
    simulation = simulate(Trace.of([0, 0], [0, 1], [0, 0]), allocator)
    assert simulation.fragmentation == (1 if simulation.peak_reserved_bytes else 0)


@every
def test_sizes_beyond_any_device_fail(allocator: str) -> None:
    trace = Trace.of([0, 0, 1, 1], [0, 1, 0, 1], [1 << 62, 1 << 57, 0, 0])
    simulation = simulate(trace, allocator)
    assert simulation.failed_at == 0
    assert (simulation.live == 0).all()


def test_fragmentation_counts_requested_bytes() -> None:
    simulation = simulate(trace_of([(0, MIB, 0), (0, MIB // 2, 0)]), "first_fit")
    assert simulation.peak_reserved_bytes == 2 * MIB
    assert simulation.fragmentation == 0.25
    assert simulation.largest_free_bytes == MIB // 2  # when most of the most held is in use


@settings(max_examples=80, deadline=None)
@given(trace=event_traces())
def test_largest_free_range_equals_a_painted_map(trace: Trace) -> None:
    simulation = simulate(trace, "first_fit")
    assert simulation.largest_free_bytes == largest_free_of(simulation)


def largest_free_of(simulation: Simulation) -> int:
    """Return the largest free range by painting 512-byte units of the one region of `first_fit`."""
    if not len(simulation.live):
        return 0
    event, segments = 0, simulation.segments
    for at in range(len(simulation.live)):
        if (simulation.reserved[at], simulation.live[at]) > (
            simulation.reserved[event],
            simulation.live[event],
        ):
            event = at
    if not simulation.reserved[event]:
        return 0
    base = int(segments.address.min())
    free = np.zeros(int(simulation.reserved[event]) // 512 + 1, np.bool_)
    free[:-1] = True
    sizes = np.diff(simulation.live, prepend=0)
    for row in np.flatnonzero(simulation.address[: event + 1] >= 0):
        begin = (int(simulation.address[row]) - base) // 512
        freed = (simulation.trace.kind == EventType.FREE) & (simulation.trace.births == row)
        if not freed[: event + 1].any():
            free[begin : begin + int(sizes[row]) // 512] = False
    longest = run = 0
    for unit in free:
        run = run + 1 if unit else 0
        longest = max(longest, run)
    return longest * 512


@pytest.mark.parametrize(
    ("allocator", "more", "what"),
    [
        ("none", {}, "no allocator 'none'"),
        ("best_fit", {"size": 1}, "no setting size"),
        ("best_fit", {"alignment_bytes": 3}, "alignment_bytes=3 is not a power of two"),
        *(
            ("best_fit", {"limit_bytes": bad}, "limit_bytes=.* is not a whole")
            for bad in (-1, True, "1GiB", 1.5)
        ),
    ],
)
def test_unknown_allocators_and_invalid_settings_are_named(
    allocator: str, more: dict[str, int], what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        simulate(trace_of([(0, 1, 0)]), allocator, **more)


@pytest.mark.parametrize("allocator", sorted(ALLOCATORS))
@pytest.mark.parametrize("bad", [True, "x", 1.5, None, -1, 2**70])
def test_setting_of_another_type_is_refused(allocator: str, bad: object) -> None:
    """Each setting raises a ValueError with the setting's name, except for types that the field allows."""
    for field in dataclasses.fields(ALLOCATORS[allocator]):
        if (bad is None and "None" in field.type) or (bad is True and field.type == "bool"):
            continue
        if bad == "x" and field.type == "str":
            continue
        with pytest.raises(ValueError, match=field.name):
            simulate(trace_of([(0, 1, 0)]), allocator, **{field.name: bad})


def test_traces_of_several_devices_or_with_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="several devices"):
        simulate(Trace.of([0, 0], [0, 1], 1, device=[0, 1]), "best_fit")
    with pytest.raises(TraceError, match="before its alloc"):
        simulate(Trace.of([1], [0]), "best_fit")


def test_native_events_are_checked() -> None:
    """Direct callers of the native side cannot free twice, nor free a row that is no alloc."""
    device = _core.SimulatedDevice(1 << 30)
    fit = _core.SimulatedFit(device, best=True, alignment=512, growth=512)
    none = np.empty(0, np.int64)
    zeros = np.zeros(3, np.int64)
    kind = np.array([0, 1, 1], np.uint8)
    _, live, reserved, failed = fit.run(kind, zeros, zeros + 512, zeros, none)
    assert (live.tolist(), reserved.tolist(), failed) == ([512, 0, 0], [512] * 3, -1)
    for birth in (zeros + 1, zeros - 1, zeros + 2):
        with pytest.raises(ValueError, match="not a"):
            fit.run(kind, birth, zeros + 512, zeros, none)
    with pytest.raises(ValueError, match="adopted"):
        fit.run(kind, zeros, zeros, zeros, np.zeros(4, np.int64))
    with pytest.raises(ValueError, match="lengths"):
        fit.run(kind, zeros, zeros[:2], zeros, none)
    with pytest.raises(ValueError, match="negative bytes"):
        _core.SimulatedDevice(-1)
    with pytest.raises(ValueError, match="not a range"):
        device.answer(0, 512)
