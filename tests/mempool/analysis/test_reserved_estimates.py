"""Remedies for a recording of PyTorch, each simulated, and reported only if the simulation saves memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mempool import simulate as simulated_allocators
from mempool.analysis import remedies as module
from mempool.analysis.remedies import estimate_reserved
from mempool.analysis.summary import summarize
from solvers.simulators import simulate
from solvers.simulators.recorded import recorded
from traces import EventType, Trace
from traces.completeness import completeness
from traces.read import read

A, F, *_ = EventType
RESERVE = EventType.RESERVE
MIB = 1 << 20
SNAPSHOTS = Path(__file__).parents[3] / "../shared/bench/pytorch_snapshots"


def snapshot(**metadata: str) -> Trace:
    """A trace of 8 MiB buffers that leave gaps in segments of 20 MiB, as simulated for PyTorch."""
    kind, buffer, size = [A] * 16, list(range(16)), [8 * MIB] * 16
    kind += [F] * 8 + [A] * 4
    buffer += [*range(0, 16, 2), *range(16, 20)]
    size += [0] * 8 + [9 * MIB] * 4
    trace = Trace.of(kind, buffer, size)
    made = simulate(trace, "pytorch")
    rows = [
        (RESERVE, -1, int(size), int(at))
        for at, size in zip(made.segments.address, made.segments.size, strict=True)
    ]
    rows += [(k, b, s, a) for k, b, s, a in zip(kind, buffer, size, made.address.tolist(), strict=True)]
    kinds, buffers, sizes, address = zip(*rows, strict=True)
    metadata = {"framework": "pytorch", "alignment": "512", **metadata}
    return Trace.of(kinds, buffers, sizes, address=address, metadata=metadata)


def with_more_reserved(trace: Trace) -> Trace:
    """The same with a segment of 100 MiB that holds nothing."""
    return Trace.of(
        np.append(RESERVE, trace.kind), np.append(-1, trace.buffer), np.append(100 * MIB, trace.size),
        address=np.append(1 << 50, trace.address), metadata=trace.metadata,
    )  # fmt: skip


def saves(trace: Trace) -> dict[str, int]:
    [device] = summarize(trace)
    return {remedy.how.split()[0]: remedy.saves_bytes for remedy in device.remedies}


def test_each_reported_saving_equals_a_simulated_saving() -> None:
    trace = snapshot()
    made = recorded(trace)
    assert made is not None
    held = made.peak_reserved_bytes

    def less(allocator: str, **settings: Any) -> int:
        return held - simulated_allocators.simulate(trace, allocator, **settings).peak_reserved_bytes

    told = saves(trace)
    pool = less(module.POOL)
    assert told.pop("run", 0) == max(pool, 0)
    assert told.pop("expandable_segments:True") == less("pytorch_expandable") > 0
    for text, saved in told.items():
        name, _, value = text.partition(":")
        assert saved == less("pytorch", **{name: int(value)}) > 0
        assert saved == max(less("pytorch", **{name: size}) for n, size, _ in module.SETTINGS if n == name)
    found = estimate_reserved(trace, made, completeness(trace, 0))
    assert found is not None
    assert (found.pool_bytes, found.plan_bytes) == (held - pool, held - less("planned"))


def test_simulation_error_is_not_credited_to_a_setting() -> None:
    """The recording reserved more than the same settings need in simulation: only the pool saves it."""
    trace = snapshot()
    told, before = saves(with_more_reserved(trace)), saves(trace)
    assert told.pop("run") == before.pop("run", 0) + 100 * MIB
    assert told == before


@pytest.mark.parametrize("history", ["window", "absent"])
def test_memory_reserved_before_the_recording_is_no_saving(history: str) -> None:
    """The memory may have served an unknown load; without events nothing can be simulated either."""
    more = dataclasses.replace(snapshot(), metadata=dict(snapshot().metadata) | {"history.0": history})
    told, before = saves(with_more_reserved(more)), saves(snapshot())
    assert told == ({} if history == "absent" else before)


@pytest.mark.parametrize("metadata", [{"framework": "cupy"}, {"framework": "pytorch", "expandable": "1"}])
def test_settings_are_proposed_only_for_their_allocator(metadata: dict[str, str]) -> None:
    trace = dataclasses.replace(snapshot(), metadata={"alignment": "512", **metadata})
    assert saves(trace).keys() <= {"run", "reserved"}
    found = estimate_reserved(trace, recorded(trace), completeness(trace, 0))
    assert (found is None) == (metadata["framework"] == "cupy")


def test_long_trace_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes reserved beyond the peak load are reported instead."""
    trace = snapshot()
    monkeypatch.setattr(module, "MOST_EVENTS", len(trace) - 1)
    made = recorded(trace)
    assert made is not None
    assert estimate_reserved(trace, made, completeness(trace, 0)) is None
    assert saves(trace) == {"reserved": made.peak_reserved_bytes - int(trace.load().max())}


def test_settings_of_the_recording_are_kept() -> None:
    """A proposal incompatible with them is left out."""
    trace = snapshot(**{"setting.PYTORCH_CUDA_ALLOC_CONF": "large_segment_size_mb:100"})
    assert not any(text.startswith("max_split_size_mb:64") for text in saves(trace))


@pytest.mark.parametrize("name", ["transformer_ctx128_fullstep", "transformer_medium_128_training"])
def test_remedies_of_a_real_window_save_the_simulated_bytes(name: str) -> None:
    path = SNAPSHOTS / f"{name}.pickle"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    trace = read(path)
    told, made = saves(trace), recorded(trace)
    assert made is not None
    assert not completeness(trace, 0).is_whole
    now = min(made.peak_reserved_bytes, simulate(trace, "pytorch").peak_reserved_bytes)
    expandable = simulate(trace, "pytorch_expandable").peak_reserved_bytes
    assert told["expandable_segments:True"] == now - expandable > 0
    pool = now - simulated_allocators.simulate(trace, module.POOL).peak_reserved_bytes
    assert told.get("run", 0) == max(pool, 0)
