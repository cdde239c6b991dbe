"""Simulated allocators: invariants, settings, models of their sources, and recorded allocators."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from allocator_models import CupyModel, Driver, Model, RmmPoolModel, play
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import MIB, check_simulation, event_traces, random_trace, trace_of

from solvers import _core, solve
from solvers.packing.plan import Stop
from solvers.simulators import ALLOCATORS, Simulation, simulate
from solvers.simulators.recorded import recorded
from traces import EventType, Trace
from traces.buffers import buffers_of
from traces.errors import TraceError
from traces.formats.snapshot import read_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[[Driver], Model]
    from numpy.typing import NDArray


every = pytest.mark.parametrize("allocator", ALLOCATORS)


@every
@settings(max_examples=60)
@given(trace=event_traces())
def test_buffers_are_disjoint_and_within_reserved_memory(allocator: str, trace: Trace) -> None:
    """Without a limit each buffer gets separate memory, and requested <= live <= reserved at all times."""
    check_simulation(simulate(trace, allocator))


@every
@settings(max_examples=60)
@given(trace=event_traces(), limit=st.sampled_from([0, 512, 2, 20, 24, 41, 64, 400]))
def test_limit_is_kept(allocator: str, trace: Trace, limit: int) -> None:
    """Reserved memory never exceeds the limit, failures are reported, and the rest is served in order."""
    limit_bytes = limit * MIB if limit < 512 else limit
    check_simulation(simulate(trace, allocator, limit_bytes=limit_bytes), limit_bytes)


@every
def test_sizes_beyond_any_device_fail(allocator: str) -> None:
    trace = Trace.of([0, 0, 1, 1], [0, 1, 0, 1], [1 << 62, 1 << 57, 0, 0])
    simulation = simulate(trace, allocator)
    assert simulation.failed_at == 0
    assert (simulation.live == 0).all()


@settings(max_examples=80)
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
        ("rmm_pool", {"initial_pool_bytes": 512, "maximum_pool_bytes": 256}, "more than maximum_pool_bytes"),
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


#: Name, settings, and the model with the same.
CASES: list[tuple[str, dict[str, Any], Make]] = [
    ("cupy", {}, CupyModel),
    ("rmm_pool", {"initial_pool_bytes": 0}, lambda driver: RmmPoolModel(driver, 0, None)),
    (
        "rmm_pool",
        {"initial_pool_bytes": 10 * MIB, "maximum_pool_bytes": 40 * MIB},
        lambda driver: RmmPoolModel(driver, 10 * MIB, 40 * MIB),
    ),
]
cases = pytest.mark.parametrize(
    ("allocator", "parameters", "make"), CASES, ids=[f"{case[0]}-{k}" for k, case in enumerate(CASES)]
)


def agree(trace: Trace, allocator: str, parameters: dict[str, Any], make: Make, limit: int) -> int | None:
    """Assert that pool and model agree at each event; return the first failed alloc, or None."""
    driver = Driver(limit)
    address, live, reserved, failed_at = play(trace, driver, make(driver))
    simulation = simulate(trace, allocator, limit_bytes=limit, **parameters)
    assert simulation.address.tolist() == address
    assert simulation.live.tolist() == live
    assert simulation.reserved.tolist() == reserved
    assert simulation.failed_at == failed_at
    held = simulation.segments.end == len(trace)
    if len(trace):
        assert set(simulation.segments.address[held].tolist()) == set(driver.held)
    return failed_at


@cases
@settings(max_examples=60)
@given(trace=event_traces(), limit=st.sampled_from([1 << 50, 64 * MIB, 41 * MIB, 24 * MIB, 3 * MIB, 512, 0]))
def test_native_pool_equals_the_model(
    allocator: str, parameters: dict[str, Any], make: Make, trace: Trace, limit: int
) -> None:
    agree(trace, allocator, parameters, make, limit)


@cases
def test_native_pool_equals_the_model_where_memory_is_short(
    allocator: str, parameters: dict[str, Any], make: Make
) -> None:
    """Long traces, most of which fail somewhere: both take the same steps against the failure."""
    failed = 0
    for seed in range(12):
        trace = random_trace(seed, 500, largest=6 * MIB)
        if seed % 2:  # adjacent segments, as of whole pages
            trace = dataclasses.replace(trace, size=-(-trace.size // (2 * MIB)) * 2 * MIB)
        limit = int(trace.load().max()) * (9 + seed % 3) // 10
        failed += agree(trace, allocator, parameters, make, limit) is not None
    assert failed


A, F, ANY = 0, 1, 1 << 50
#: An index of `CASES`, a limit, and steps rare in random traces: (A, bytes, stream), (F, which, stream)
CORNERS = {
    "segments in use stay": (0, 6144, [(A, 2048, 0)] * 2 + [(F, 0, 0)] * 2 + [(A, 512, 0), (A, 4096, 0)]),
    "adjacent segments stay apart": (1, ANY, [(A, MIB, 0)] * 2 + [(F, 1, 0), (F, 0, 0), (A, 2 * MIB, 0)]),
    "lists of streams merge": (
        1,
        ANY,
        [(A, 2 * MIB, 0), (F, 0, 0), (A, MIB, 0), (A, MIB, 0), (F, 0, 1), (F, 0, 2), (A, 2 * MIB, 3)],
    ),
}


@pytest.mark.parametrize("name", CORNERS)
def test_native_pool_equals_the_model_in_corners(name: str) -> None:
    case, limit, steps = CORNERS[name]
    agree(trace_of(steps), *CASES[case], limit)


def test_cupys_own_pool_equals_the_model(tmp_path: Path) -> None:
    if importlib.util.find_spec("cupy_backends") is None:
        pytest.skip("CuPy is not installed")
    judge = Path(__file__).parents[1] / "support" / "cupy_judge.py"
    ran = subprocess.run(
        [sys.executable, str(judge), "6"], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    unlimited, short, limited = map(int, ran.stdout.split())
    assert unlimited == 0
    assert short
    assert limited


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


@settings(max_examples=60)
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


ALLOC, FREE = int(EventType.ALLOC), int(EventType.FREE)


def test_planned_allocator_uses_the_offsets_of_solve() -> None:
    trace = random_trace(5, 600)
    simulation = simulate(trace, "planned", alignment_bytes=256, nodes=1000)
    buffers = buffers_of(trace)
    rounded = -(-buffers.size // 256) * 256
    assert int(simulation.live.max()) <= int(rounded.sum())
    rows = np.flatnonzero(trace.kind == EventType.ALLOC)
    offset = simulation.address[rows] - simulation.segments.address[0]
    assert (offset[buffers.size > 0] % 256 == 0).all()
    plan = solve(buffers_of(trace, alignment=256), stop=Stop(nodes=1000))
    assert simulation.peak_reserved_bytes <= plan.arena_bytes * 1.05


def test_plan_beyond_the_device_is_cut_off() -> None:
    """A plan that needs more than the live bytes, as with two streams, is limited by the device."""
    steps = [(ALLOC, 2 * MIB, 0), (FREE, 0, 0), (ALLOC, 2 * MIB, 1), (FREE, 0, 0), (ALLOC, MIB, 0)]
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
