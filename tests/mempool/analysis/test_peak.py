"""Memory at the peak: shares, roles, absences, remedies, and estimates of reserved bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempool import simulate as simulated_allocators
from mempool.analysis import remedies as module
from mempool.analysis.peak import Role, absences, at_peak, shares
from mempool.analysis.remedies import estimate_reserved, remedies
from mempool.analysis.summary import summarize
from solvers.simulators import simulate
from solvers.simulators.recorded import recorded
from traces import EventType, Trace
from traces.completeness import completeness
from traces.read import read

A, F, R, W, *_ = EventType


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    rows: list[tuple[int, int, int, int]] = []
    alive: list[int] = []
    for _ in range(draw(st.integers(0, 40))):
        kind = draw(st.sampled_from([A, A, F, R, W]))
        name = draw(st.integers(-1, 2))
        if kind == A:
            alive.append(len(rows))
            rows.append((A, len(rows), draw(st.integers(0, 9)), name))
        elif alive:
            buffer = draw(st.sampled_from(alive))
            rows.append((kind, buffer, 0, -1))
            if kind == F:
                alive.remove(buffer)
    kind, buffer, size, name = np.array(rows, np.int64).reshape(-1, 4).T
    return Trace.of(kind, buffer, size, operation=name, names=["mul", "add", "mm"])


@given(traces())
def test_buffers_at_the_peak_equal_a_loop_over_the_events(trace: Trace) -> None:
    alive: dict[int, int] = {}
    best: dict[int, int] = {}
    event = 0
    for row in range(len(trace)):
        if trace.kind[row] == A:
            alive[row] = int(trace.size[row])
        elif trace.kind[row] == F:
            del alive[int(trace.births[row])]
        if sum(alive.values()) > sum(best.values()):
            best, event = dict(alive), row
    peak = at_peak(trace)
    assert peak.bytes == sum(best.values())
    if peak.bytes:
        assert peak.event == event
        found = dict(zip(peak.alloc.tolist(), peak.size.tolist(), strict=True))
        assert found == {row: size for row, size in best.items() if size}
    assert (np.diff(peak.size) <= 0).all()


@given(traces())
def test_shares_add_up_to_the_peak_and_the_largest_comes_first(trace: Trace) -> None:
    peak = at_peak(trace)
    every = shares(trace, peak, trace.operation, 10)
    assert sum(share.bytes for share in every) == int(peak.size.sum())
    assert sum(share.buffers for share in every) == len(peak.size)
    assert [share.bytes for share in every] == sorted((share.bytes for share in every), reverse=True)
    assert shares(trace, peak, trace.operation, 1) == every[:1]
    for share in every:
        number = -1 if share.name is None else trace.names.index(share.name)
        assert share.bytes == int(peak.size[trace.operation[peak.alloc] == number].sum())


@given(traces())
def test_absences_equal_a_search_per_buffer(trace: Trace) -> None:
    peak = at_peak(trace)
    found = absences(trace, peak)
    accesses = np.flatnonzero((trace.kind == R) | (trace.kind == W)).tolist()
    if not accesses:
        assert found is None
        return
    assert found is not None
    for k, alloc in enumerate(peak.alloc.tolist()):
        own = [row for row in accesses if trace.births[row] == alloc]
        assert found.last[k] == max([alloc, *(row for row in own if row <= peak.event)])
        later = [row for row in own if row > peak.event]
        assert found.next[k] == (min(later) if later else peak.end[k])
        assert found.used_again[k] == bool(later)


def test_roles_distinguish_persistent_and_wrap_around_buffers() -> None:
    kind = [A, A, A, F, A, A, F, F, A, A, F, F]
    buffer = [0, 1, 2, 2, 3, 4, 4, 1, 5, 6, 6, 3]
    trace = Trace.of(kind, buffer, [1, 2, 4, 0, 8, 16, 0, 0, 32, 64, 0, 0])
    peak = at_peak(trace, np.array([1, 4, 8]))
    role = dict(zip(peak.size.tolist(), peak.role.tolist(), strict=True))
    assert role == {64: Role.PASSING, 32: Role.TO_THE_END, 8: Role.WRAP_AROUND, 1: Role.PERSISTENT}


def test_remedies_tell_late_frees_from_absences() -> None:
    late, away, used = 0, 1, 2
    kind = [A, A, A, W, W, W, A, R, F, R, F, F, F]
    buffer = [late, away, used, late, away, used, 3, used, 3, away, late, away, used]
    size = [100, 50, 25, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    trace = Trace.of(kind, buffer, size)
    peak = at_peak(trace)
    found = remedies(peak, absences(trace, peak), None, iteration_events=40)
    assert {one.name: one.saves_bytes for one in found} == {"free_earlier": 100, "swap": 50}
    assert remedies(peak, None, None, 40) == []


ALLOC, FREE, *_ = EventType
RESERVE = EventType.RESERVE
MIB = 1 << 20
SNAPSHOTS = Path(__file__).parents[3] / "../shared/bench/pytorch_snapshots"


def snapshot(**metadata: str) -> Trace:
    """A trace of 8 MiB buffers that leave gaps in segments of 20 MiB, as simulated for PyTorch."""
    kind, buffer, size = [ALLOC] * 16, list(range(16)), [8 * MIB] * 16
    kind += [FREE] * 8 + [ALLOC] * 4
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
    """The same trace with an empty segment of 100 MiB."""
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
    """The memory may have served an unknown load, which cannot be simulated without events."""
    more = dataclasses.replace(snapshot(), metadata=dict(snapshot().metadata) | {"history.0": history})
    told, before = saves(with_more_reserved(more)), saves(snapshot())
    assert told == ({} if history == "absent" else before)


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
