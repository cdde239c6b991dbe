"""The pool simulated on recorded sequences, and the cost of divergence."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import divergence
import numpy as np
import pytest
import sequences
from divergence import cost_of
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import MIB, check_simulation, event_traces, trace_of
from sequences import NETWORKS, varied

from mempool import _core
from mempool.simulate import simulate
from traces.trace import EventType, Trace
from traces.workload import generate

NAME, GROWING = NAMES = ("planned_online", "planned_growing")


def repeated(iterations: int, *, marks: bool) -> Trace:
    """Return a trace of iterations of some 300 allocations each, after persistent buffers."""
    trace = generate(300, seed=1, iterations=iterations)
    names = ("step", *trace.names[1:]) if marks else trace.names
    return Trace.of(
        trace.kind, trace.buffer, trace.size, operation=trace.operation, names=names, stream=trace.stream
    )


@pytest.mark.parametrize("most", [1 << 28, 1 << 31, 1 << 35])
@pytest.mark.parametrize("network", NETWORKS)
def test_varying_sizes_hold_no_more_than_pytorch(network: str, most: int) -> None:
    """No plan has slots for the sizes, and each leaves a hole that fits no other size; pages fit any."""
    trace = varied(network, most, 40)
    pytorch, expandable = (
        simulate(trace, name).peak_reserved_bytes for name in ("pytorch", "pytorch_expandable")
    )
    assert simulate(trace, NAME).peak_reserved_bytes <= 1.1 * pytorch
    assert simulate(trace, GROWING).peak_reserved_bytes <= 1.25 * expandable


@pytest.mark.parametrize("network", NETWORKS)
def test_single_plan_serves_all_sizes_of_marked_iterations(network: str) -> None:
    """No second plan lies beside the arena for outgrown iterations."""
    trace = varied(network, 1 << 31, 120, marks=True)
    (ends,), peak = np.nonzero(trace.kind == EventType.MARK), int(trace.load().max())
    pytorch = simulate(trace, "pytorch").peak_reserved_bytes
    plain, growing = simulate(trace, NAME), simulate(trace, GROWING)
    assert plain.peak_reserved_bytes <= min(pytorch, 1.4 * peak)
    assert growing.peak_reserved_bytes <= 1.3 * peak
    assert int(growing.reserved[ends[100] :].max()) <= 1.25 * peak


@settings(max_examples=60)
@given(trace=event_traces(), limit=st.sampled_from([None, 0, 2, 24, 64, 400]), name=st.sampled_from(NAMES))
def test_pool_keeps_the_invariants_of_every_allocator(trace: Trace, limit: int | None, name: str) -> None:
    limit_bytes = None if limit is None else limit * MIB
    check_simulation(simulate(trace, name, limit_bytes=limit_bytes), limit_bytes)


@pytest.mark.parametrize("marks", [False, True])
def test_iterations_are_planned(marks: bool) -> None:
    trace = repeated(16, marks=marks)
    simulation = simulate(trace, NAME)
    check_simulation(simulation)
    marks_at = np.flatnonzero((trace.kind == EventType.MARK) & (trace.operation == 0))
    before, last = (
        simulation.address[start:end][trace.kind[start:end] == EventType.ALLOC]
        for start, end in ((marks_at[-3], marks_at[-2]), (marks_at[-2], marks_at[-1]))
    )
    large = (
        trace.size[marks_at[-2] : marks_at[-1]][trace.kind[marks_at[-2] : marks_at[-1]] == EventType.ALLOC]
        > 512
    )
    assert (before == last)[large].mean() > 0.99
    assert (simulation.segments.start < marks_at[-3]).all()
    load = int(trace.load().max())
    assert load <= simulation.reserved[-1] < 1.3 * load


def test_uses_by_other_streams_reach_the_pool() -> None:
    """A buffer read by another stream is not planned, as the end of the read is unknown."""
    kinds = [int(EventType.ALLOC), int(EventType.READ), int(EventType.FREE)] * 40
    buffers, sizes = np.repeat(np.arange(40), 3), np.tile([MIB, 0, 0], 40)
    own, other = (
        simulate(Trace.of(kinds, buffers, sizes, stream=np.tile([0, reader, 0], 40)), NAME)
        for reader in (0, 1)
    )
    assert len(own.segments) == len(other.segments) + 1
    check_simulation(other)


def test_no_environment_has_a_say(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = repeated(6, marks=True)
    plain = simulate(trace, NAME)
    monkeypatch.setenv("MEMPOOL", "off")
    assert (simulate(trace, NAME).address == plain.address).all()


@pytest.mark.parametrize(("setting", "value"), [("small_bytes", 1025), ("wait_bytes", -1)])
def test_settings_out_of_range_are_named(setting: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{setting}={value} is not a whole number"):
        simulate(trace_of([(0, 1, 0)]), NAME, **{setting: value})


@pytest.mark.parametrize(
    "wrong",
    [{"birth": [0, 2]}, {"birth": [0, -1]}, {"size": [-1, 0]}, {"stream": [0]}, {"mark": [-1]}],
)
def test_invalid_columns_are_refused(wrong: dict[str, list[int]]) -> None:
    """The core reads no further than the columns reach, whoever calls."""
    columns = {"kind": [0, 1], "birth": [0, 0], "size": [8, 0], "stream": [0, 0], "mark": [-1, -1], **wrong}
    kinds = {"kind": np.uint8, "mark": np.int8}
    device = _core.ReplayDevice(1 << 40)
    client = _core.Client(_core.Pool(device=device), "test")
    table = {name: np.array(column, kinds.get(name, np.int64)) for name, column in columns.items()}
    with pytest.raises(ValueError, match="columns"):
        _core.Replay(client, device, **table)


#: Least hit rate in the differing iterations and the one after each; extra allocations cannot hit.
LEAST_HITS = {
    sequences.many_extra: 0.7,
    sequences.stretch_repeated: 0.92,
    sequences.other_sizes_from_here: 0.6,
    sequences.freed_late: 0.85,
    sequences.exception: 0.9,
    sequences.evaluation: 0.8,
    sequences.fewer_samples: 0.75,
}
#: Kinds after which the pool is back on its plan within a few allocations, not only in the next iteration.
SOON = {*sequences.DIVERGENCES} - LEAST_HITS.keys() | {sequences.exception}


@pytest.mark.parametrize("at", range(len(sequences.DIVERGENCES)))
def test_pool_returns_to_its_plan_after_a_difference(at: int) -> None:
    """Each kind on one network, each network with several kinds; no two live buffers ever overlap."""
    returns(sequences.DIVERGENCES[at], [NETWORKS[(at + 1) % len(NETWORKS)]], seed=0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("kind", sequences.DIVERGENCES, ids=lambda kind: kind.__name__)
def test_pool_returns_to_its_plan_on_all_networks(kind: Callable[..., sequences.Diverged], seed: int) -> None:
    returns(kind, list(NETWORKS), seed=seed)


def returns(kind: Callable[..., sequences.Diverged], names: list[str], seed: int) -> None:
    cost = cost_of(names, kind, seed)
    assert len(cost.recoveries) == divergence.DIFFERENCES * len(names)
    assert cost.hits >= LEAST_HITS.get(kind, 0.96) * cost.allocations
    if kind in SOON:
        assert statistics.median(cost.recoveries) <= 10


def test_pool_without_marks_is_not_much_worse_than_with_marks() -> None:
    for kind in (sequences.missing, sequences.evaluation, sequences.extra):
        marks, none = (cost_of(["unet"], kind, 0, marks=marks) for marks in (True, False))
        assert none.allocations - none.hits <= 1.5 * (marks.allocations - marks.hits) + 32
