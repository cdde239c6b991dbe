"""Snapshots of PyTorch's allocator: what was alive, where, and since when."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traces import Kind, Trace, TraceError
from traces.files import sniff
from traces.snapshot import read_snapshot

SHARED = Path(__file__).parents[3] / "shared" / "bench" / "pytorch_snapshots"


def event(action: str, addr: int, size: int, time: int = 0, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 3, "time_us": time, "frames": []} | more


def segment(*blocks: tuple[int, int, int, str], device: int = 0) -> dict[str, Any]:
    names = ("address", "size", "requested_size", "state")
    return {
        "device": device,
        "address": blocks[0][0],
        "stream": 3,
        "total_size": sum(block[1] for block in blocks),
        "blocks": [dict(zip(names, block, strict=True)) for block in blocks],
    }


def stored(path: Path, *devices: list[Any], segments: list[Any] | None = None) -> Path:
    data = {"segments": segments or [], "device_traces": list(devices), "allocator_settings": {}}
    path.write_bytes(pickle.dumps(data, 4))
    return path


def test_a_buffer_lives_until_its_free_is_completed(tmp_path: Path) -> None:
    events = [
        event("segment_alloc", 0, 2 << 20),
        event("alloc", 512, 100, 1),
        event("free_requested", 512, 100, 2),
        event("alloc", 1024, 7, 3),
        event("free_completed", 512, 100, 4),
    ]
    trace = read_snapshot(stored(tmp_path / "s", events))
    assert sniff(tmp_path / "s") == "snapshot"
    assert trace.load().tolist() == [0, 100, 107, 7]
    assert trace.address.tolist() == [0, 512, 1024, -1]
    assert trace.time_ns.tolist() == [0, 1000, 3000, 4000]
    assert set(trace.stream.tolist()) == {3}
    assert trace.alignment == 512
    assert trace.metadata["action.free_requested"] == "1"


def test_what_was_there_before_the_recording_is_alive_from_its_start(tmp_path: Path) -> None:
    events = [event("alloc", 512, 10, 5), event("free_completed", 2048, 300, 6)]
    held = segment((0, 512, 400, "active_allocated"), (512, 512, 10, "active_allocated"))
    free = segment((4096, 512, 0, "inactive"), (4608, 1024, 900, "active_awaiting_free"))
    trace = read_snapshot(stored(tmp_path / "s", events, segments=[held, free]))
    assert trace.load().tolist() == [0, 0, 300, 700, 1600, 1610, 1310]
    assert trace.address.tolist() == [0, 4096, 2048, 0, 4608, 512, -1]
    assert trace.time_ns.tolist() == [5000] * 6 + [6000]
    assert trace.metadata["alive_before"] == "3"


def segments_held(trace: Trace) -> dict[int, int]:
    """Bytes of each range that the rows of segments say is held at the end, where all ranges are whole."""
    ranges: dict[int, int] = {}
    for row in np.flatnonzero(trace.kind >= Kind.RESERVE).tolist():
        address, size = int(trace.address[row]), int(trace.size[row])
        if trace.kind[row] == Kind.RESERVE:
            assert address not in ranges
            ranges[address] = size
        else:
            assert ranges.pop(address) == size
    return ranges


def test_segments_are_reserved_and_released_and_those_of_before_come_first(tmp_path: Path) -> None:
    events = [
        event("segment_alloc", 4096, 1024, 1),
        event("segment_free", 8192, 512, 2),
        event("segment_alloc", 8192, 2048, 3),
        event("segment_free", 4096, 1024, 4),
    ]
    segments = [segment((0, 512, 0, "inactive")), segment((8192, 2048, 0, "inactive"))]
    trace = read_snapshot(stored(tmp_path / "s", events, segments=segments))
    rows = np.column_stack([trace.kind, trace.address, trace.size]).tolist()
    before = [[Kind.RESERVE, 0, 512], [Kind.RESERVE, 8192, 512]]
    assert rows[:3] == [*before, [Kind.RESERVE, 4096, 1024]]
    assert segments_held(trace) == {0: 512, 8192: 2048}
    assert trace.metadata["alive_before"] == "0"
    assert set(trace.stream.tolist()) == {3}


def test_an_expandable_segment_grows_and_shrinks_at_both_ends(tmp_path: Path) -> None:
    events = [
        event("segment_map", 3072, 1024, 1),
        event("segment_unmap", 0, 1024, 2),
        event("segment_map", 4096, 512, 3),
    ]
    segments = [segment((1024, 3584, 0, "inactive"))]
    trace = read_snapshot(stored(tmp_path / "s", events, segments=segments))
    before = np.column_stack([trace.address, trace.size])[: len(trace) - 3].tolist()
    assert before == [[0, 1024], [1024, 2048]]


def test_devices_are_joined_by_their_clock_and_each_keeps_its_own_order(tmp_path: Path) -> None:
    first = [event("alloc", 512, 1, 10), event("free_completed", 512, 1, 9), event("alloc", 512, 2, 30)]
    second = [event("alloc", 512, 4, 20)]
    trace = read_snapshot(stored(tmp_path / "s", first, second))
    assert trace.device.tolist() == [0, 0, 1, 0]
    assert trace.size.tolist() == [1, 0, 4, 2]


def test_what_was_there_on_any_device_comes_before_all_events(tmp_path: Path) -> None:
    first, second = [event("alloc", 512, 1, 10)], [event("free_completed", 512, 4, 20)]
    trace = read_snapshot(stored(tmp_path / "s", first, second))
    assert trace.device.tolist() == [1, 0, 1]
    assert trace.load().tolist() == [4, 5, 1]


def test_operation_and_source_line_come_from_the_stack_without_folders(tmp_path: Path) -> None:
    frames = [
        {"name": "at::_ops::mul_Tensor::call(at::Tensor)", "filename": "??", "line": 0},
        {"name": "step", "filename": "/x/site-packages/torch/optim/sgd.py", "line": 7},
        {"name": "train", "filename": "/home/me/train.py", "line": 12},
    ]
    events = [event("alloc", 512, 1, frames=frames), event("alloc", 1024, 1)]
    trace = read_snapshot(stored(tmp_path / "s", events))
    assert [trace.names[i] for i in (trace.operation[0], trace.frame[0])] == ["mul_Tensor", "train.py:12"]
    assert (trace.operation[1], trace.frame[1]) == (-1, -1)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([event("alloc", 512, 1), event("alloc", 512, 1)], "event 1: address 0x200 is allocated again"),
        ([event("alloc", 512, -1)], "event 0: size -1 is out of range"),
        ([event("alloc", 512, 2**70)], "out of range"),
        ([event("alloc", 512, "big")], "size is 'big', not a number"),  # type: ignore[arg-type]
        ([event("alloc", 512, 1, time=-5)], "time_us -5"),
        ([event("alloc", 512, 1, frames=[3])], "an int where a dict belongs"),
        ([{"action": "alloc"}], "addr is 'None', not a number"),
        ([7], "an int where a dict belongs"),
    ],
)
def test_events_that_cannot_be_are_named(tmp_path: Path, events: list[Any], reason: str) -> None:
    with pytest.raises(TraceError, match=reason.replace("an int", "a int")) as caught:
        read_snapshot(stored(tmp_path / "s", events))
    assert str(caught.value).startswith(str(tmp_path / "s"))


@pytest.mark.parametrize("data", [[], {}, {"segments": 3, "device_traces": []}, {"segments": []}])
def test_other_plain_pickles_are_refused(tmp_path: Path, data: object) -> None:
    path = tmp_path / "s"
    path.write_bytes(pickle.dumps(data, 4))
    with pytest.raises(TraceError, match=r"not a memory snapshot|belongs"):
        read_snapshot(path)


def test_a_segment_of_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    held = segment((0, 512, 400, "active_allocated"), device=1)
    with pytest.raises(TraceError, match="a segment of device 1, of 1 devices"):
        read_snapshot(stored(tmp_path / "s", [], segments=[held]))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared snapshots are not here")
@pytest.mark.parametrize("path", sorted(SHARED.glob("*.pickle")), ids=lambda path: path.stem)
def test_a_real_snapshot_ends_with_what_its_segments_hold(path: Path) -> None:
    trace = read_snapshot(path)
    with path.open("rb") as file:
        data = pickle.load(file)  # of the project's own shared data
    blocks = [
        block for part in data["segments"] for block in part["blocks"] if block["state"].startswith("active")
    ]
    freed = np.isin(trace.buffer, trace.buffer[trace.kind == Kind.FREE])
    alive = (trace.kind == Kind.ALLOC) & ~freed
    held = sorted((block["address"], block["requested_size"]) for block in blocks)
    assert sorted(zip(trace.address[alive].tolist(), trace.size[alive].tolist(), strict=True)) == held
    assert segments_held(trace) == {part["address"]: part["total_size"] for part in data["segments"]}
    assert len(trace) > 0
