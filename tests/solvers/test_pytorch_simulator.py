"""The simulated PyTorch allocator against a slow model of the rules, and the parsing of settings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_model import MIB, Model
from simulations import check_simulation, event_traces, random_trace, trace_of

from solvers.simulators import simulate
from solvers.simulators.pytorch import PyTorch
from traces.trace import EventType, Trace


def run_model(trace: Trace, model: Model) -> tuple[list[int], list[int], list[int]]:
    """Return the address of each event, and live and reserved bytes after the event."""
    addresses, live, reserved = [], [], []
    placed: dict[int, int] = {}
    for row in range(len(trace)):
        buffer, address = int(trace.buffer[row]), None
        if trace.kind[row] == EventType.ALLOC and trace.size[row]:
            address = model.allocate(int(trace.size[row]), int(trace.stream[row]))
            if address is not None:
                placed[buffer] = address
        elif trace.kind[row] == EventType.FREE and buffer in placed:
            model.free(placed.pop(buffer))
        addresses.append(-1 if address is None else address)
        live.append(model.live)
        reserved.append(model.reserved)
    return addresses, live, reserved


@st.composite
def model_settings(draw: st.DrawFn) -> dict[str, Any]:
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


def model_of(limit: int, *, expandable: bool, **chosen: Any) -> Model:
    divisions = chosen.get("roundup_power2_divisions", 0)
    split = chosen.get("max_split_size_mb")
    return Model(
        limit,
        max_split=1 << 62 if split is None else split * MIB,
        rounding=chosen.get("max_non_split_rounding_mb", 20) * MIB,
        large=chosen.get("large_segment_size_mb", 20) * MIB,
        threshold=chosen.get("garbage_collection_threshold", 0.0),
        divisions=(divisions,) * 16 if isinstance(divisions, int) else divisions,
        expandable=expandable,
    )


@pytest.mark.parametrize("allocator", ["pytorch", "pytorch_expandable"])
@settings(max_examples=100, deadline=None)
@given(
    trace=event_traces(),
    limit=st.sampled_from([22, 42, 64, 100, 400, 700, 1 << 30]),
    chosen=model_settings(),
)
def test_simulator_agrees_with_the_model(
    allocator: str, trace: Trace, limit: int, chosen: dict[str, Any]
) -> None:
    """Every address, and live and reserved bytes after every event, with any settings and limit."""
    simulation = simulate(trace, allocator, limit_bytes=limit * MIB, **chosen)
    model = model_of(limit * MIB, expandable=allocator != "pytorch", **chosen)
    address, live, reserved = run_model(trace, model)
    assert simulation.address.tolist() == address
    assert simulation.live.tolist() == live
    assert simulation.reserved.tolist() == reserved
    check_simulation(simulation, limit * MIB)


@pytest.mark.parametrize("allocator", ["pytorch", "pytorch_expandable"])
@pytest.mark.parametrize("chosen", [{}, {"max_split_size_mb": 20, "garbage_collection_threshold": 0.6}])
def test_long_traces_agree_with_the_model(allocator: str, chosen: dict[str, Any]) -> None:
    trace = random_trace(5, 1200, largest=40 * MIB)
    limit = int(trace.load().max()) * 11 // 10 // MIB * MIB
    simulation = simulate(trace, allocator, limit_bytes=limit, **chosen)
    model = model_of(limit, expandable=allocator != "pytorch", **chosen)
    address, live, reserved = run_model(trace, model)
    assert simulation.address.tolist() == address
    assert (simulation.live.tolist(), simulation.reserved.tolist()) == (live, reserved)


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


def test_expandable_segments_setting_must_agree_with_the_allocator() -> None:
    simulate(trace_of([]), "pytorch_expandable", conf="expandable_segments:True")
    with pytest.raises(ValueError, match=r"expandable_segments:False is the allocator pytorch$"):
        simulate(trace_of([]), "pytorch_expandable", conf="expandable_segments:False")


def test_division_lists_need_sixteen_numbers() -> None:
    with pytest.raises(ValueError, match="has 3 numbers, not 16"):
        PyTorch(roundup_power2_divisions=(1, 2, 4))
