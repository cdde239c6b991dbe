"""The reader of memory snapshots as a simple model: all of it as Python's objects, then a dict at a time."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from held_model import Held
from living_model import Living
from plain_pickles import read_plain

from traces.columns import LARGEST
from traces.errors import TraceError
from traces.trace import COLUMNS, NAMED, Kind, Trace

if TYPE_CHECKING:
    from _typeshed import StrPath

_NOWHERE: list[Any] = []
#: What an action becomes. An expandable segment is mapped and unmapped piece by piece.
_KINDS = {
    "alloc": Kind.ALLOC,
    "free": Kind.FREE,
    "free_completed": Kind.FREE,
    "segment_alloc": Kind.RESERVE,
    "segment_map": Kind.RESERVE,
    "segment_free": Kind.RELEASE,
    "segment_unmap": Kind.RELEASE,
}
_PYTORCHS = re.compile(r"torch/|.*(site|dist)-packages/torch/", re.DOTALL)
_OPERATION = re.compile(r"at::_ops::(\w+)::", re.ASCII)


def model_snapshot(path: StrPath) -> Trace:
    """As `traces.snapshot.read_snapshot`, without settings."""
    data = read_plain(path)
    try:
        if not isinstance(data, dict) or not {"segments", "device_traces"} <= data.keys():
            raise TraceError("a pickle, but not a memory snapshot of PyTorch")
        devices = [_device(at, events) for at, events in enumerate(_list(data["device_traces"]))]
        for segment in _list(data["segments"]):
            _held(devices, _dict(segment))
        for device in devices:
            device.before[:0] = _segments_before(device)
        trace = _joined(devices)
        trace.validate()
        expandable = any(segment.get("is_expandable") is True for segment in data["segments"])
    except TraceError as error:
        raise error.within(path) from None
    return dataclasses.replace(trace, metadata={**trace.metadata, "expandable": str(int(expandable))})


@dataclass
class _Device:
    """One device's events as rows of (kind, buffer, size, stream, time in us, operation, frame, address).

    ``before`` are allocs of what was there already, ``segments`` what is held at the end.
    """

    rows: list[tuple[int, ...]] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)
    living: Living = field(default_factory=Living)
    segments: Held = field(default_factory=Held)
    buffers: int = 0
    stacks: list[tuple[str, str]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


def _device(index: int, events: Any) -> _Device:
    device = _Device()
    known: dict[int, int] = {}  # stacks are shared by many events: each is looked at once
    for row, event in enumerate(_list(events)):
        try:
            _add(device, _dict(event), known)
        except TraceError as error:
            raise TraceError(f"device {index}, event {row}: {error.reason}") from None
    return device


def _add(device: _Device, event: dict[Any, Any], known: dict[int, int]) -> None:
    kind = _KINDS.get(str(event.get("action")))
    if kind is None:
        device.skipped[str(event.get("action"))[:40]] += 1
        return
    address, size, stream = (_integer(event, name) for name in ("addr", "size", "stream"))
    time = _integer(event, "time_us") if "time_us" in event else 0
    if kind in (Kind.RESERVE, Kind.RELEASE):
        device.rows.append((kind, -1, size, stream, time, -1, address))
        return
    if kind == Kind.FREE:
        buffer = device.living.free(address, size, device.buffers)
        if buffer == device.buffers:
            device.buffers += 1
            device.before.append((Kind.ALLOC, buffer, size, stream, time, -1, address))
        device.rows.append((Kind.FREE, buffer, 0, stream, time, -1, -1))
        return
    buffer = device.buffers
    device.living.alloc(address, size, buffer)
    device.buffers += 1
    frames = event.get("frames", _NOWHERE)
    if id(frames) not in known:
        known[id(frames)] = len(device.stacks)
        device.stacks.append(_where(_list(frames)))
    device.rows.append((Kind.ALLOC, buffer, size, stream, time, known[id(frames)], address))


def _where(frames: list[Any]) -> tuple[str, str]:
    """Operation and source line of a stack, innermost first; empty where unknown."""
    operation = line = ""
    for frame in frames:
        name, file = str(_dict(frame).get("name", "")), str(frame.get("filename", ""))
        if not operation and (found := _OPERATION.match(name)):
            operation = found[1]
        if file.endswith(".py") and not _PYTORCHS.match(file):
            line = f"{file.rsplit('/', 1)[-1]}:{frame.get('line', 0)}"
            break
    return operation, line


def _held(devices: list[_Device], segment: dict[Any, Any]) -> None:
    """Add what a segment holds at the end and no event allocated."""
    index, stream = segment.get("device", 0), _integer(segment, "stream")
    if not isinstance(index, int) or not 0 <= index < len(devices):
        raise TraceError(f"a segment of device {str(index)[:20]}, of {len(devices)} devices")
    device = devices[index]
    begin = address = _integer(segment, "address")
    for block in map(_dict, _list(segment.get("blocks", []))):
        address = _integer(block, "address") if "address" in block else address
        if str(block.get("state")).startswith("active"):
            size = _integer(block, "requested_size" if "requested_size" in block else "size")
            if device.living.alive(address, size, device.buffers):
                device.before.append((Kind.ALLOC, device.buffers, size, stream, -1, -1, address))
                device.buffers += 1
        address += _integer(block, "size")
    device.segments.at[begin] = (max(address - begin, _integer(segment, "total_size")), stream)


def _segments_before(device: _Device) -> list[tuple[int, ...]]:
    """Rows of the segments that were there when the recording began."""
    events = [(row[0], row[6], row[2], row[3]) for row in device.rows if row[0] >= Kind.RESERVE]
    held = sorted(device.segments.before(events).at.items())
    return [(Kind.RESERVE, -1, size, stream, -1, -1, address) for address, (size, stream) in held]


def _joined(devices: list[_Device]) -> Trace:
    """All devices' events in the order of their clock, what was there before first."""
    columns, clocks = [], []
    names: dict[str, int] = {}
    first = 0
    for at, device in enumerate(devices):
        rows = np.array(device.before + device.rows, np.int64).reshape(-1, 7)
        times = rows[:, 4]
        begin = int(times[len(device.before) :].min(initial=LARGEST)) if device.rows else 0
        times[: len(device.before)] = begin
        clock = np.maximum.accumulate(times)
        clock[: len(device.before)] = -1
        rows[:, 1] += first
        rows[rows[:, 0] >= Kind.RESERVE, 1] = -1
        first += device.buffers
        texts = np.array(
            [[names.setdefault(text, len(names)) if text else -1 for text in pair] for pair in device.stacks]
            + [[-1, -1]],
            np.int64,
        )
        columns.append(np.column_stack([rows, texts[rows[:, 5]], np.full(len(rows), at)]))
        clocks.append(clock)
    table = np.concatenate([*columns, np.empty((0, 10), np.int64)])
    table = table[np.argsort(np.concatenate([*clocks, np.empty(0, np.int64)]), kind="stable")]
    kind, buffer, size, stream, time, _, address, operation, frame, where = table.T
    return Trace.of(
        kind,
        buffer,
        size,
        stream=stream,
        time_ns=time * 1000,
        operation=operation,
        frame=frame,
        address=address,
        device=where,
        names=list(names),
        metadata=_metadata(devices),
    )


def _metadata(devices: list[_Device]) -> dict[str, str]:
    skipped = sum((device.skipped for device in devices), Counter[str]())
    return {
        "framework": "pytorch",
        "alignment": "512",
        "alive_before": str(sum(row[0] == Kind.ALLOC for device in devices for row in device.before)),
    } | {f"action.{name}": str(count) for name, count in sorted(skipped.items())}


def _integer(table: dict[Any, Any], name: str) -> int:
    value = table.get(name)
    if type(value) is not int:
        raise TraceError(f"{name} is {str(value)[:40]!r}, not a number")
    if not 0 <= value <= LARGEST // 1024:
        raise TraceError(f"{name} {str(value)[:40]} is out of range")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TraceError(f"a {type(value).__name__} where a list belongs")
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TraceError(f"a {type(value).__name__} where a dict belongs")
    return value


def assert_same(native: Trace, model: Trace) -> None:
    """The same rows, with the same texts, and the same metadata but for settings."""
    for name in set(COLUMNS) - set(NAMED):
        np.testing.assert_array_equal(getattr(native, name), getattr(model, name), name)
    for name in NAMED:
        texts = [
            [one.names[i] if i >= 0 else "" for i in getattr(one, name).tolist()] for one in (native, model)
        ]
        assert texts[0] == texts[1]
    metadata = [{k: v for k, v in one.metadata.items() if "setting." not in k} for one in (native, model)]
    assert metadata[0] == metadata[1]
