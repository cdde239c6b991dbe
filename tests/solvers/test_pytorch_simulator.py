"""PyTorch's simulated allocator: invariants, settings, and the judge of real recordings."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from recording_judge import judge
from recordings import MIB, check_simulation, event_traces, random_trace, recording_of, trace_of

from solvers.simulators import simulate
from traces.errors import TraceError
from traces.formats.snapshot import read_snapshot
from traces.trace import EventType, Trace


@st.composite
def drawn_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Any combination of settings, in the words of the simulator."""
    chosen: dict[str, Any] = {}
    if draw(st.booleans()):
        chosen["max_split_size_mb"] = draw(st.sampled_from([24, 40, 400]))
        chosen["max_non_split_rounding_mb"] = draw(st.sampled_from([24, 30]))
    if draw(st.booleans()):
        steps = st.sampled_from([0, 1, 2, 4, 8])
        one = draw(st.booleans())
        chosen["roundup_power2_divisions"] = (
            draw(steps) if one else tuple(draw(st.lists(steps, min_size=16, max_size=16)))
        )
    if draw(st.booleans()):
        chosen["garbage_collection_threshold"] = draw(st.sampled_from([0.1, 0.5, 0.8]))
    if draw(st.booleans()):
        chosen["large_segment_size_mb"] = draw(st.sampled_from([12, 24]))
    return chosen


@pytest.mark.parametrize("allocator", ["pytorch", "pytorch_expandable"])
@settings(max_examples=100)
@given(
    trace=event_traces(),
    limit=st.sampled_from([22, 42, 64, 100, 400, 700, 1 << 30]),
    chosen=drawn_settings(),
)
def test_any_settings_and_limit_keep_the_invariants(
    allocator: str, trace: Trace, limit: int, chosen: dict[str, Any]
) -> None:
    """PyTorch itself is compared in tests/rehearsal/test_simulated_pytorch.py."""
    check_simulation(simulate(trace, allocator, limit_bytes=limit * MIB, **chosen), limit * MIB)


def test_garbage_collection_threshold_needs_a_limit() -> None:
    """Without a limit the threshold is a fraction of nothing."""
    trace = random_trace(3, 600, largest=40 * MIB)
    plain, collected = (simulate(trace, "pytorch", garbage_collection_threshold=t) for t in (0.0, 0.1))
    assert (plain.address == collected.address).all()


@pytest.mark.parametrize(
    ("conf", "name", "value"),
    [
        ("max_split_size_mb:128", "max_split_size_mb", 128),
        (" garbage_collection_threshold : 0.6 ,", "garbage_collection_threshold", 0.6),
        ("backend:native,large_segment_size_mb:12", "large_segment_size_mb", 12),
        ("roundup_power2_divisions:8", "roundup_power2_divisions", 8),
        (
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
            "roundup_power2_divisions",
            (1,) * 8 + (1, 2) + (8,) * 6,
        ),
        (
            "roundup_power2_divisions:[4:2,64:8],max_non_split_rounding_mb:30",
            "roundup_power2_divisions",
            (2, 2, 2, 0, 0, 0, 8) + (0,) * 9,
        ),
        ("pinned_use_background_threads:True,expandable_segments:False", "max_split_size_mb", None),
    ],
)
def test_settings_are_parsed_like_pytorch(conf: str, name: str, value: object) -> None:
    assert simulate(trace_of([]), "pytorch", conf=conf).parameters[name] == value


@pytest.mark.parametrize(
    ("conf", "what"),
    [
        ("max_split_size:128", "no simulated setting 'max_split_size'"),
        ("per_process_memory_fraction:0.5", "no simulated setting 'per_process_memory_fraction'"),
        ("max_split_size_mb:many", "max_split_size_mb has no value 'many'"),
        ("max_split_size_mb:19", "max_split_size_mb=19"),
        ("max_split_size_mb", "is not key:value"),
        ("max_split_size_mb:30 max", "max_split_size_mb has no value '30max'"),
        ("garbage_collection_threshold:1", "garbage_collection_threshold=1.0"),
        ("garbage_collection_threshold:nan", "garbage_collection_threshold=nan"),
        ("large_segment_size_mb:10", "large_segment_size_mb=10"),
        ("roundup_power2_divisions:[3:1]", "roundup_power2_divisions has no value"),
        ("roundup_power2_divisions:[4:3]", "3 is no power of two"),
        ("roundup_power2_divisions:[4:2", "is not key:value"),
        ("backend:cudaMallocAsync", "backend has no value"),
        ("expandable_segments:yes", "expandable_segments has no value"),
        ("expandable_segments:True", "the allocator pytorch_expandable"),
    ],
)
def test_invalid_settings_are_named(conf: str, what: str) -> None:
    with pytest.raises(ValueError, match=what.replace("[", r"\[")):
        simulate(trace_of([]), "pytorch", conf=conf)


SNAPSHOTS = Path(__file__).parents[3] / "shared" / "bench" / "pytorch_snapshots"
SHIFT = 1 << 45
#: Of each snapshot: rows of the first state, segments, allocs, events.
FIGURES = {
    "small": (0, 9, 36, 62),
    "transformer_ctx128_fullstep": (551, 783, 6771, 12665),
    "transformer_medium_128_training": (1041, 0, 6526, 12831),
}


@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason="no recorded snapshots beside the checkout")
@pytest.mark.parametrize("name", FIGURES)
def test_real_snapshots_are_reproduced(name: str) -> None:
    judged = judge(read_snapshot(SNAPSHOTS / f"{name}.pickle"))
    assert (judged.begin, judged.segments, judged.allocs, judged.events) == FIGURES[name]
    assert judged.segments_alike == judged.segments_simulated == judged.segments
    assert judged.addresses_alike == judged.allocs
    assert judged.reserved_alike == judged.events
    assert judged.exact
    assert judged.first_difference == ""


@settings(max_examples=60)
@given(trace=event_traces(), limit=st.sampled_from([40, 64, 400, 1 << 30]))
def test_recording_of_the_simulator_is_reproduced(trace: Trace, limit: int) -> None:
    """Including the segments released when memory ran out."""
    truth = simulate(trace, "pytorch", limit_bytes=limit * MIB)
    assume(len(truth.segments))
    judged = judge(recording_of(truth, shift=SHIFT))
    failed = int(((truth.address < 0) & (trace.kind == EventType.ALLOC) & (trace.size > 0)).sum())
    assert judged.exact or failed
    check_simulation(judged.simulation)


@settings(max_examples=75)
@given(trace=event_traces(), part=st.floats(0, 1))
def test_initial_state_of_small_requests_is_inferred_from_any_event_on(trace: Trace, part: float) -> None:
    """Small requests determine the state: wherever the recording begins, the rest is reproduced."""
    small = Trace.of(trace.kind, trace.buffer, np.minimum(trace.size, 70_000), stream=trace.stream)
    truth = simulate(small, "pytorch")
    assume(len(truth.segments))
    judged = judge(recording_of(truth, int(part * len(small)), SHIFT))
    assert judged.exact


@settings(max_examples=100)
@given(trace=event_traces(), part=st.floats(0, 1))
def test_inferred_initial_state_of_large_requests_is_consistent(trace: Trace, part: float) -> None:
    """Large requests do not determine the state; buffers stay disjoint, initial ones where they are."""
    truth = simulate(trace, "pytorch")
    assume(len(truth.segments))
    recording = recording_of(truth, int(part * len(trace)), SHIFT)
    judged = judge(recording)
    simulation, begin = judged.simulation, judged.begin
    assert (simulation.address[:begin] == np.where(recording.kind == 0, recording.address, -1)[:begin]).all()
    ends = simulation.address + recording.size
    alive: set[int] = set()
    for row in range(len(recording)):
        if recording.kind[row] == EventType.FREE:
            alive.discard(int(recording.births[row]))
        elif simulation.address[row] >= 0:
            low, high = simulation.address[row], ends[row]
            assert all(high <= simulation.address[k] or ends[k] <= low for k in alive)
            alive.add(row)


def test_recording_under_other_rules_is_judged_inexact() -> None:
    trace = random_trace(4, 1500, largest=60 * MIB)
    recording = recording_of(simulate(trace, "pytorch", max_split_size_mb=24), shift=SHIFT)
    assert judge(recording, conf="max_split_size_mb:24").exact
    judged = judge(recording)
    assert not judged.exact
    assert judged.first_difference.startswith("event ")
    assert judged.reserved_alike < judged.events


def test_recorded_settings_are_used_by_the_judge() -> None:
    """Settings need not be given again: from the environment's text, or in the allocator's final form."""
    trace = random_trace(4, 1500, largest=60 * MIB)
    chosen = {"max_split_size_mb": 24, "roundup_power2_divisions": (0,) * 5 + (4,) * 11}
    recording = recording_of(simulate(trace, "pytorch", **chosen), shift=SHIFT)  # type: ignore[arg-type]
    divisions = json.dumps({str(1 << k): chosen["roundup_power2_divisions"][k] for k in range(16)})  # type: ignore[index]
    told = {"setting.max_split_size": str(24 * MIB), "setting.roundup_power2_divisions": divisions}
    assert judge(dataclasses.replace(recording, metadata={**recording.metadata, **told})).exact
    assert not judge(recording).exact
    text = "max_split_size_mb:24,roundup_power2_divisions:[1:0,32:4,>:4]"
    told = {"setting.PYTORCH_CUDA_ALLOC_CONF": text}
    assert judge(dataclasses.replace(recording, metadata={**recording.metadata, **told})).exact


@settings(max_examples=100)
@given(st.data())
def test_any_recording_is_judged_or_refused(data: st.DataObject) -> None:
    """Segments and buffers anywhere, on top of each other or of nothing, given back or not."""
    place = st.integers(0, 12).map(lambda k: k * MIB + k % 3 * 512)
    size = st.sampled_from([1, 512, MIB, 2 * MIB, 3 * MIB, 20 * MIB])
    kinds = st.sampled_from([EventType.ALLOC, EventType.RESERVE, EventType.RELEASE, EventType.FREE])
    rows = data.draw(st.lists(st.tuples(kinds, size, place, st.integers(0, 1)), min_size=1, max_size=30))
    table, alive = [(int(EventType.RESERVE), -1, 2 * MIB, 0, 0)], []
    for kind, many, at, stream in rows:
        if kind == EventType.ALLOC:
            alive.append(len(table))
        if kind != EventType.FREE:
            table.append((int(kind), len(table) if kind == EventType.ALLOC else -1, many, at, stream))
        elif alive:
            table.append((int(kind), alive.pop(at % len(alive)), 0, -1, stream))
    kind, buffer, size_, address, stream_ = np.array(table).T
    before = str(data.draw(st.integers(0, 5)))
    trace = Trace.of(kind, buffer, size_, address=address, stream=stream_, metadata={"alive_before": before})
    with contextlib.suppress(TraceError):
        judged = judge(trace)
        assert judged.simulation.live.min() >= 0
        assert (judged.simulation.live <= judged.simulation.reserved).all()


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"kind": [5, 5], "address": [4096, 4097], "size": 512}, "on top of another"),
        ({"kind": [5, 5], "address": [1 << 56, 1 << 20], "size": 512}, "memory that no device has"),
        ({"kind": [5, 5], "address": [4096, 1 << 20], "size": 1 << 60}, "memory that no device has"),
        ({"kind": [5, 5], "address": [4096, 1 << 20], "size": 0}, "memory that no device has"),
    ],
)
def test_impossible_segments_are_errors(columns: dict[str, object], what: str) -> None:
    with pytest.raises(TraceError, match=what):
        judge(Trace.of(buffer=-1, **columns))  # type: ignore[arg-type]


def test_contradictory_initial_states_are_accepted_as_far_as_possible() -> None:
    """Buffers outside all segments, or at the same address, are left out."""
    trace = Trace.of(
        [EventType.RESERVE] + [EventType.ALLOC] * 5,
        [-1, 0, 1, 2, 3, 4],
        [2 * MIB, 1 << 62, 512, 512, 512, 1 << 62],
        address=[MIB, MIB, MIB + 1024, MIB + 1024, 1 << 40, (1 << 62) - 1],
        metadata={"alive_before": "5"},
    )
    judged = judge(trace)
    assert judged.begin == 6
    assert judged.simulation.live[-1] == 1024 + 512


def test_unjudgeable_traces_are_refused() -> None:
    with pytest.raises(ValueError, match="what its allocator reserved"):
        judge(trace_of([(0, 1, 0)]))
    with pytest.raises(ValueError, match="several devices"):
        judge(Trace.of([5, 5], -1, 512, address=[0, 512], device=[0, 1]))
    with pytest.raises(ValueError, match="expandable segments"):
        judge(Trace.of([5], -1, 512, address=0, metadata={"expandable": "1"}))
