"""Traces of PyTorch's profiler as memory traces: lifetimes of buffers, and operations that allocated them."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.simulators.recorded import recorded
from traces import EventType, Trace, TraceError
from traces.completeness import completeness
from traces.formats.chrome import read_chrome
from traces.formats.registry import sniff


def memory(
    ts: float, addr: int, size: int, *, tid: int = 7, kind: int = 0, index: int = -1
) -> dict[str, Any]:
    args = {"Total Reserved": 0, "Total Allocated": 0, "Bytes": size, "Addr": addr}
    args |= {"Device Type": kind, "Device Id": index, "Ev Idx": 1}
    return {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 7, "tid": tid} | {
        "ts": ts,
        "args": args,
    }


def span(cat: str, name: str, ts: float, dur: float, *, tid: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": ts, "dur": dur, "args": {}}


def stored(path: Path, *events: Any) -> Path:
    whole = {"schemaVersion": 1, "deviceProperties": [], "traceEvents": list(events), "traceName": "x"}
    path.write_text(" " + json.dumps(whole, indent=1))
    return path


def names(trace: Trace, column: str) -> list[str | None]:
    return [trace.names[at] if at >= 0 else None for at in getattr(trace, column).tolist()]


def test_memory_events_become_buffers_in_the_order_of_their_times(tmp_path: Path) -> None:
    """Check operator and source line around each event, on the event's own thread."""
    path = stored(
        tmp_path / "t.json",
        memory(30.5, 512, -100),
        span("cpu_op", "aten::empty", 10, 5),
        span("cpu_op", "aten::randn", 9, 20),
        span("cpu_op", "aten::add", 0, 100, tid=8),
        span("python_function", "train.py(12): step", 1, 90),
        span("python_function", "/home/me/site-packages/torch/nn/modules/module.py(9): _call_impl", 2, 80),
        span("python_function", "torch/nn/modules/linear.py(7): forward", 2, 80),
        span("python_function", "<built-in method randn>", 3, 70),
        memory(12, 512, 100),
        memory(20.25, 1024, 7),
        {"ph": "i", "name": "[OutOfMemory]", "ts": 3, "pid": 7, "tid": 7, "args": {"Bytes": 9}},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    )
    trace = read_chrome(path)
    assert sniff(path) == "chrome"
    assert trace.load().tolist() == [0, 100, 107, 7]
    assert trace.time_ns.tolist() == [3_000, 12_000, 20_250, 30_500]
    assert trace.address.tolist() == [-1, 512, 1024, -1]
    assert names(trace, "operation") == [None, "aten::empty", "aten::randn", None]
    assert names(trace, "frame") == ["train.py:12"] * 4
    assert (trace.devices, trace.alignment) == ((-1,), 64)
    refused = trace.kind == EventType.REFUSED
    assert (trace.size[refused].tolist(), trace.time_ns[refused].tolist()) == ([9], [3_000])


def test_devices_and_host_are_separate(tmp_path: Path) -> None:
    """Each device has separate addresses; a buffer freed without an alloc is older than the recording."""
    path = stored(
        tmp_path / "t.json",
        memory(1, 512, 100),
        memory(2, 512, 1024, kind=1, index=0),
        memory(3, 512, 2048, kind=1, index=1),
        memory(4, 4096, -512, kind=1, index=1),
        memory(5, 512, -1024, kind=1, index=0),
    )
    trace = read_chrome(path)
    assert trace.devices == (-1, 0, 1)
    assert trace.on_device(0).load().tolist() == [1024, 0]
    assert trace.on_device(1).load().tolist() == [512, 2560, 2048]
    assert (trace.metadata["alive_before"], trace.metadata["device_type"]) == ("1", "1")
    assert read_chrome(stored(path, memory(2, 512, 1024, kind=1, index=0))).alignment == 512


@pytest.mark.parametrize(
    ("category", "marks"), [("user_annotation", 1), ("Operator", 1), ("gpu_user_annotation", 0)]
)
def test_repeated_records_of_a_step_become_a_single_mark(category: str, marks: int, tmp_path: Path) -> None:
    """Early releases call a step an operator; the GPU's track repeats the step for its own work."""
    steps = span(category, "ProfilerStep#1", 1, 5)
    trace = read_chrome(stored(tmp_path / "t.json", memory(2, 512, 8), steps))
    assert (trace.kind == EventType.MARK).sum() == marks


@given(
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=20),
    data=st.data(),
    packed=st.booleans(),
    plain=st.booleans(),
)
@settings(max_examples=50)
def test_events_are_read_in_any_file_order(
    sizes: list[int], data: st.DataObject, packed: bool, plain: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    events, load, alive = [], [], {}
    for at, size in enumerate(sizes):
        if alive and data.draw(st.booleans()):
            address = data.draw(st.sampled_from(sorted(alive)))
            events.append(memory(at, address, -alive.pop(address)))
        else:
            alive[(at + 1) * 64] = size
            events.append(memory(at, (at + 1) * 64, size))
        load.append(sum(alive.values()))
    events = data.draw(st.permutations(events))
    text = json.dumps(events if plain else {"traceEvents": events}).encode()
    path = tmp_path_factory.getbasetemp() / "t.json"
    path.write_bytes(gzip.compress(text) if packed else text)
    assert sniff(path) == "chrome"
    assert read_chrome(path).load().tolist() == load


WRONG = [
    (memory(1, 512, 2**63), "Bytes 9223"),
    (memory(1, -5, 8), "Addr -5"),
    (memory(1, 2**64, 8), "Addr 1844"),
    (memory(-1, 512, 8), "not a time: ts '-1'"),
    (memory(1e300, 512, 8), "not a time: ts"),
    (memory(float("nan"), 512, 8), "not a time: ts 'nan'"),
    (memory(1, 512, 8, kind=1, index=-1), "no device: -1"),
    (memory(1, 512, 8) | {"args": {"Bytes": 8}}, "without an address"),
    (memory(1, 512, 8) | {"args": 5}, "without an address"),
    (memory(1, 512, "8"), "not a number: Bytes '8'"),  # type: ignore[arg-type]
    (memory(1, 512, 8) | {"tid": [1]}, "without a thread"),
    (memory(1, 512, 8) | {"ts": 10**400}, "not a time"),
    (memory(9, 64, 8), "allocated again without a free: address 0x40"),
    (memory(1, 512, 8, kind=1, index=70000), "no device: 70000"),
    (span("cpu_op", "x", -5, 1), "not a time: ts"),
    (memory(2, 60, 8), "allocated over a buffer that is alive: address 0x3c"),
    (memory(2, 66, -8), "freed, but overlaps a buffer that is alive: address 0x42"),
    ([1], "not an object"),
]


@pytest.mark.parametrize(("event", "reason"), WRONG)
def test_invalid_event_is_reported_or_skipped_and_counted(event: Any, reason: str, tmp_path: Path) -> None:
    path = stored(tmp_path / "t.json", memory(1, 64, 8), event, memory(3, 128, 16))
    with pytest.raises(TraceError, match=reason) as caught:
        read_chrome(path)
    assert (caught.value.file, caught.value.row) == (str(path), 1)
    skipped = Counter[str]()
    assert read_chrome(path, skipped=skipped).load().tolist() == [8, 24]
    assert skipped.total() == 1


def test_limits_on_events_names_and_threads_are_enforced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = [span("cpu_op", f"op{at}", at, 50 - 2 * at, tid=7) for at in range(9)]
    path = stored(tmp_path / "t.json", *spans, memory(10, 64, 8), memory(11, 128, 8, tid=8))
    monkeypatch.setattr("traces.formats.chrome._MOST_NAMES", 5)
    assert names(read_chrome(path), "operation") == [None, None]
    assert len(read_chrome(path).names) == 5
    monkeypatch.setattr("traces.formats.logs.MOST_THREADS", 1)
    with pytest.raises(TraceError, match="row 10: more than 1 threads"):
        read_chrome(path)
    monkeypatch.setattr("traces.formats.chrome.MAX_EVENTS", 9)
    for skipped in (None, Counter[str]()):
        with pytest.raises(TraceError, match="more than 9 events"):
            read_chrome(path, skipped=skipped)


def test_events_of_equal_time_keep_the_file_order(tmp_path: Path) -> None:
    """Clocks are coarse: a buffer may be allocated and freed within one tick."""
    ticks = [(at * 7919 % 5, size) for at in range(500) for size in (8, -8)]
    path = stored(tmp_path / "t.json", *(memory(tick, 64, size) for tick, size in ticks))
    assert read_chrome(path).load().tolist() == [8, 0] * 500


def test_two_types_of_devices_are_refused(tmp_path: Path) -> None:
    path = stored(tmp_path / "t.json", *(memory(1, 512, 8, kind=kind, index=0) for kind in (1, 12)))
    with pytest.raises(TraceError, match="more than one type of device: 12"):
        read_chrome(path)


def test_lenient_mode_reads_a_truncated_file_up_to_the_end(tmp_path: Path) -> None:
    path = stored(tmp_path / "t.json", memory(1, 64, 8), memory(2, 128, 8))
    path.write_text(path.read_text()[:-80])
    with pytest.raises(TraceError, match="row 1: truncated"):
        read_chrome(path)
    skipped = Counter[str]()
    assert read_chrome(path, skipped=skipped).load().tolist() == [8]
    assert skipped == {"truncated": 1}


RECORD = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, schedule
layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.Adam(layers.parameters())
with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True,
             schedule=schedule(wait=0, warmup=1, active=5),
             on_trace_ready=lambda p: p.export_chrome_trace(sys.argv[1])) as recorded:
    for _ in range(6):
        loss = layers(torch.randn(32, 64)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorded.step()
"""


@pytest.mark.full
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_trace_written_by_pytorch_is_read(name: str, tmp_path: Path) -> None:
    """The load equals the allocator's total, and operators and source lines are known."""
    pytest.importorskip("torch")
    program, path = tmp_path / "train.py", tmp_path / name
    program.write_text(RECORD)
    environment = {**os.environ, "KINETO_LOG_LEVEL": "5"}
    subprocess.run([sys.executable, program, path], cwd=tmp_path, check=True, env=environment)
    raw = path.read_bytes()
    whole = json.loads(gzip.decompress(raw) if name.endswith("gz") else raw)
    told = sorted((e for e in whole["traceEvents"] if e["name"] == "[memory]"), key=lambda e: e["ts"])
    trace = read_chrome(path)
    buffers = trace.of_buffers
    born = trace.metadata["alive_before"]
    known = np.array([event["args"]["Total Allocated"] for event in told])
    load = trace.load()[buffers]
    assert (int(born), len(load)) == (0, len(told))
    assert set((load - known).tolist()) == {int(load[0] - known[0])}  # older buffers that are never freed
    assert (trace.kind == EventType.MARK).sum() == 5
    assert "aten::addmm" in names(trace, "operation")
    assert any((name or "").startswith("train.py:") for name in names(trace, "frame"))


def on_gpu(ts: float, addr: int, size: int, allocated: int, reserved: int, order: int = -1) -> dict[str, Any]:
    event = memory(ts, addr, size, kind=1, index=0)
    event["args"] |= {"Total Allocated": allocated, "Total Reserved": reserved, "Ev Idx": order}
    return event


@given(
    base=st.integers(0, 1000),
    cached=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    frees=st.sets(st.integers(0, 11)),
)
def test_totals_of_the_allocator_are_the_load_and_the_reservation(
    tmp_path_factory: pytest.TempPathFactory, base: int, cached: int, sizes: list[int], frees: set[int]
) -> None:
    """Memory from before the recording counts, with and without a free of a part of that memory."""
    path = tmp_path_factory.getbasetemp() / "t.json"
    allocated, reserved, told, events = base, base + cached, [], []
    freed_before = [size for at, size in enumerate(sizes) if at not in frees and size <= base][:1]
    for at, size in enumerate(sizes):
        allocated += size
        reserved = max(reserved, allocated)
        events.append(on_gpu(at + 1, 512 * (at + 1), size, allocated, reserved))
        told.append((allocated, reserved))
        if at in frees:
            allocated -= size
            events.append(on_gpu(at + 1.5, 512 * (at + 1), -size, allocated, reserved))
            told.append((allocated, reserved))
    for size in freed_before:
        allocated -= size
        events.append(on_gpu(len(sizes) + 1, 1 << 30, -size, allocated, reserved))
        told.append((allocated, reserved))
    trace = read_chrome(stored(path, *events))
    made = recorded(trace)
    assert made is not None
    moved = np.flatnonzero(trace.of_buffers)[-len(told) :]
    assert list(zip(trace.load()[moved].tolist(), made.reserved[moved].tolist(), strict=True)) == told
    assert made.largest_free_bytes is None
    assert completeness(trace, 0).is_whole == (base == 0)


LOST = {
    "zeros": ([5e9, 5e9 + 1, 0, 0], [-1] * 4),
    "indexed zeros": ([5e9, 5e9 + 1, 0, 0], [1, 2, 3, 4]),
    "one that is too early": ([10, 20, 5, 30], [1, 2, 3, 4]),
}


@pytest.mark.parametrize("name", LOST)
def test_times_that_contradict_the_order_are_an_error_or_counted(name: str, tmp_path: Path) -> None:
    """If such events are counted, the order of the file decides."""
    times, order = LOST[name]
    moves = [(512, 8), (512, -8), (1024, 8), (1024, -8)]
    events = [on_gpu(ts, *move, 0, 0, index) for ts, move, index in zip(times, moves, order, strict=True)]
    path = stored(tmp_path / "t.json", *events)
    with pytest.raises(TraceError, match="row 2: a time that contradicts the order of the events"):
        read_chrome(path)
    skipped = Counter[str]()
    assert read_chrome(path, skipped=skipped).load().tolist() == [8, 0, 8, 0]
    assert skipped.total() == sum(time in (0, 5) for time in times)


def of_threads(times: list[float]) -> list[dict[str, Any]]:
    """Return two events of the backward pass's thread, numbered first by the profiler, and two others."""
    moves = [(1024, 8), (1024, -8), (512, 4), (512, -4)]
    events = [on_gpu(ts, *move, 0, 0, at) for at, (ts, move) in enumerate(zip(times, moves, strict=True))]
    for event in events[2:]:
        event["tid"] = 8
    return events


def test_indices_order_the_events_of_a_single_thread_only(tmp_path: Path) -> None:
    """PyTorch's CUDA build runs the backward pass in a separate thread, and numbers thread by thread."""
    trace = read_chrome(stored(tmp_path / "t.json", *of_threads([20, 40, 10, 30])))
    assert trace.load().tolist() == [4, 12, 8, 0]
    assert trace.time_ns.tolist() == [10_000, 20_000, 30_000, 40_000]


def test_event_with_a_lost_time_gets_the_time_of_the_previous_event_of_its_thread(tmp_path: Path) -> None:
    path = stored(tmp_path / "t.json", *of_threads([20, 40, 10, 5]))
    with pytest.raises(TraceError, match="row 3: a time that contradicts the order of the events"):
        read_chrome(path)
    skipped = Counter[str]()
    trace = read_chrome(path, skipped=skipped)
    assert trace.time_ns.tolist() == [10_000, 10_000, 20_000, 40_000]
    assert (trace.load().tolist(), skipped.total()) == ([4, 0, 8, 0], 1)


@pytest.mark.parametrize(
    ("file", "own"),
    [
        (r"C:\me\train.py", True),
        (r"C:\venv\Lib\site-packages\torch\nn\a.py", False),
        ("/x/lib/python3.12/site-packages/einops/a.py", False),
        ("/src/mempool/mempool/torch/compiled/costs.py", False),
        ("/usr/lib/python3.12/threading.py", False),
        ("/x/lib/python3.12/site-packages/transformers/models/bert/modeling_bert.py", True),
        ("/x/dist-packages/torch/a.py", False),
        ("torch/a.py", False),
        ("/me/torch/a.py", True),
    ],
)
def test_source_line_is_the_innermost_function_outside_of_libraries(
    file: str, own: bool, tmp_path: Path
) -> None:
    spans = [
        span("python_function", "a.py(1): f", 1, 90),
        span("python_function", f"{file}(7): g", 2, 80),
    ]
    trace = read_chrome(stored(tmp_path / "t.json", *spans, memory(5, 64, 8)))
    base = file.replace("\\", "/").rsplit("/", 1)[-1]
    assert names(trace, "frame") == [f"{base}:7" if own else "a.py:1"]


@pytest.mark.parametrize("allocated", [0, -5])
def test_reserved_bytes_count_where_allocated_ones_are_unknown(allocated: int, tmp_path: Path) -> None:
    """Such a file is a window: nobody knows what was allocated before."""
    events = [on_gpu(at + 1, 4096 * at, 1000, allocated, 2600) for at in range(2)]
    trace = read_chrome(stored(tmp_path / "t.json", *events))
    made = recorded(trace)
    assert made is not None
    assert made.peak_reserved_bytes == 2600
    assert not completeness(trace, 0).is_whole
