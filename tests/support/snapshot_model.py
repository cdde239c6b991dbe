"""Slow model of the reader of memory snapshots, on Python's objects."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from held_model import Held
from living_model import Living

from traces.columns import LARGEST
from traces.errors import TraceError
from traces.trace import AUTOMATIC_MARK, COLUMNS, NAMED, RANGE_BEGIN, RANGE_END, EventType, Trace

if TYPE_CHECKING:
    from _typeshed import StrPath

_NOWHERE: list[Any] = []
#: Kind of event of each action. Expandable segments are mapped and unmapped piece by piece.
_KINDS = {
    "alloc": EventType.ALLOC,
    "free": EventType.FREE,
    "free_completed": EventType.FREE,
    "segment_alloc": EventType.RESERVE,
    "segment_map": EventType.RESERVE,
    "segment_free": EventType.RELEASE,
    "segment_unmap": EventType.RELEASE,
    "oom": EventType.REFUSED,
}
_SEGMENT = (EventType.RESERVE, EventType.RELEASE)
_PYTORCHS = re.compile(r"torch/|.*((site|dist)-packages/torch/|/torchinductor_)", re.DOTALL)
_LIBRARYS = re.compile(
    r"(?!.*(/models/|modeling_[^/]*$)).*(site|dist)-packages/"
    r"|(?!.*(site|dist)-packages/)(.*/lib(64)?/python3|.:/.*/Lib/|.:/Lib/)",
    re.DOTALL,
)
_OPERATION = re.compile(r"at::_ops::(\w+)::", re.ASCII)
_MOST_FRAMES, _LONGEST_FUNCTION, _LONGEST_ANNOTATION = 64, 200, 200


class _Row(NamedTuple):
    """An event; unknown texts are empty."""

    kind: int
    buffer: int
    size: int
    stream: int
    time: int
    address: int
    place: tuple[str, str, str] = ("", "", "")
    module: str = ""
    range: str = ""
    pool: int = 0


def model_snapshot(path: StrPath) -> Trace:
    """Return the trace that `traces.formats.snapshot.read_snapshot` should return, without settings."""
    with Path(path).open("rb") as file:
        data = _Plain(file).load()
    try:
        if not isinstance(data, dict) or not {"segments", "device_traces"} <= data.keys():
            raise TraceError("a pickle, but not a memory snapshot of PyTorch")
        pools = {(0, 0): 0}
        devices = [_device(at, events, pools) for at, events in enumerate(_list(data["device_traces"]))]
        _annotate(devices, data.get("external_annotations", []))
        for segment in _list(data["segments"]):
            _held(devices, _dict(segment), pools)
        if len(pools) > 1 and not any(device.pools_told for device in devices):
            for device in devices:
                _place_in_pools(device)
        live = [sum(row.size for row in device.before) for device in devices]
        for device in devices:
            device.before[:0] = _segments_before(device)
        trace = _joined(devices, live)
        trace.validate()
        expandable = any(segment.get("is_expandable") is True for segment in data["segments"])
    except TraceError as error:
        raise error.within(path) from None
    return dataclasses.replace(trace, metadata={**trace.metadata, "expandable": str(int(expandable))})


class _Plain(pickle.Unpickler):
    """Python's own reader of pickles, for built-in types only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a snapshot")


@dataclass
class _Device:
    """One device's events; ``before`` are allocs of earlier buffers, ``segments`` are those at the end."""

    rows: list[_Row] = field(default_factory=list)
    before: list[_Row] = field(default_factory=list)
    marks: list[_Row] = field(default_factory=list)
    living: Living = field(default_factory=Living)
    segments: Held = field(default_factory=Held)
    pool_of: dict[tuple[int, int], int] = field(default_factory=dict)  # of segments [begin, end)
    pools_told: bool = False
    buffers: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


def _device(index: int, events: Any, pools: dict[Any, int]) -> _Device:
    device = _Device()
    known: dict[int, tuple[str, str, str]] = {}  # stacks are shared by many events: each is looked at once
    for row, event in enumerate(_list(events)):
        try:
            _add(device, _dict(event), known, pools)
        except TraceError as error:
            raise TraceError(f"device {index}, event {row}: {error.reason}") from None
    return device


def _pool(pools: dict[Any, int], value: Any) -> int:
    small = isinstance(value, tuple) and len(value) == 2
    if not small or not all(type(part) is int and 0 <= part < 1 << 29 for part in value):
        return 0
    return pools.setdefault(value, len(pools))


def _add(
    device: _Device, event: dict[Any, Any], known: dict[int, tuple[str, str, str]], pools: dict[Any, int]
) -> None:
    kind = _KINDS.get(str(event.get("action")))
    if kind is None:
        device.skipped[str(event.get("action"))[:40]] += 1
        return
    free = event.get("device_free")
    address = free if type(free) is int and 0 <= free <= LARGEST // 1024 else -1
    if kind != EventType.REFUSED:
        address = _integer(event, "addr")
    size = _refused_size(event.get("size")) if kind == EventType.REFUSED else _integer(event, "size")
    stream = _integer(event, "stream")
    time = _integer(event, "time_us") if "time_us" in event else 0
    device.pools_told |= isinstance(event.get("pool_id"), tuple)
    row = _Row(kind, -1, size, stream, time, address, pool=_pool(pools, event.get("pool_id")))
    if kind in _SEGMENT:
        device.rows.append(row)
        return
    if kind == EventType.FREE:
        buffer = device.living.free(address, size, device.buffers)
        if buffer == device.buffers:
            device.buffers += 1
            device.before.append(row._replace(kind=EventType.ALLOC, buffer=buffer))
        device.rows.append(row._replace(buffer=buffer, size=0, address=-1, pool=0))
        return
    frames = event.get("frames", _NOWHERE)
    if kind == EventType.ALLOC:
        device.living.alloc(address, size, device.buffers)
        text = event.get("user_metadata")
        row = row._replace(buffer=device.buffers, module=text if isinstance(text, str) else "")
        device.buffers += 1
    if id(frames) not in known:
        known[id(frames)] = _where(_list(frames))
    device.rows.append(row._replace(place=known[id(frames)]))


def _refused_size(value: Any) -> int:
    """Return the bytes of a request that failed, 0 if unknown; the failure counts in any case."""
    if type(value) is not int:
        return 0
    if not -(1 << 59) <= value < 1 << 59:
        return LARGEST // 1024
    return min(max(value, 0), LARGEST // 1024)


def _where(frames: list[Any]) -> tuple[str, str, str]:
    """Return the operation, source line and Python frames of a stack, innermost first; "" if unknown."""
    operation = function = line = outside = ""
    texts: list[str] = []
    for at, frame in enumerate(map(_dict, frames)):
        name, file = str(frame.get("name", "")), str(frame.get("filename", "")).replace("\\", "/")
        if not operation and not outside and (found := _OPERATION.match(name)):
            operation = found[1]
        if not file.endswith(".py"):
            continue
        base, pytorchs = file.rsplit("/", 1)[-1], bool(_PYTORCHS.match(file))
        place, name = f"{base}:{frame.get('line', 0)}", name[:_LONGEST_FUNCTION]
        if at == 0 and pytorchs and name:
            function = f"{base[:-3]}.{name}"
        if not pytorchs:
            outside = outside or place
            line = line or ("" if _LIBRARYS.match(file) else place)
        texts.append(f"{place} {name}" if name else place)
    return operation or function, line or outside, "\n".join(texts[:_MOST_FRAMES])


def _annotate(devices: list[_Device], annotations: Any) -> None:
    """Add marks for the ranges and steps of the program, in the order of their times."""
    first = len(devices)
    for one in _list(annotations):
        try:
            at, time = _integer(_dict(one), "device") if "device" in one else 0, _integer(one, "time_us")
        except TraceError:
            continue
        stage, name = one.get("stage"), one.get("name") if isinstance(one.get("name"), str) else ""
        if at >= len(devices) or stage not in ("START", "END"):
            continue
        name = name.strip("# ")[:_LONGEST_ANNOTATION] or name
        first = min(first, at)
        mark = _Row(EventType.MARK, -1, 0, 0, time, -1)
        marks = devices[at].marks
        if name.startswith("ProfilerStep#"):
            marks += [mark] if stage == "START" else []
            continue
        kind = RANGE_BEGIN if stage == "START" else RANGE_END
        marks.append(mark._replace(place=(name, "", ""), range=kind))
        if stage == "END" and name.startswith("Optimizer.step"):
            marks.append(mark._replace(place=(AUTOMATIC_MARK, "", "")))
    for at, device in enumerate(devices):
        device.marks = [mark for mark in device.marks if mark.range or at == first]
        device.marks.sort(key=lambda mark: mark.time)


def _held(devices: list[_Device], segment: dict[Any, Any], pools: dict[Any, int]) -> None:
    """Add the buffers in a segment at the end that no event allocated."""
    index, stream = segment.get("device", 0), _integer(segment, "stream")
    if not isinstance(index, int) or not 0 <= index < len(devices):
        raise TraceError(f"a segment of device {str(index)[:20]}, of {len(devices)} devices")
    device = devices[index]
    pool = _pool(pools, segment.get("segment_pool_id"))
    begin = address = _integer(segment, "address")
    for block in map(_dict, _list(segment.get("blocks", []))):
        address = _integer(block, "address") if "address" in block else address
        if str(block.get("state")).startswith("active"):
            size = _integer(block, "requested_size" if "requested_size" in block else "size")
            place = _where(_list(block.get("frames", _NOWHERE)))
            if device.living.alive(address, size, device.buffers):
                row = _Row(EventType.ALLOC, device.buffers, size, stream, -1, address, place, pool=pool)
                device.before.append(row)
                device.buffers += 1
        address += _integer(block, "size")
    total = max(address - begin, _integer(segment, "total_size"))
    device.segments.at[begin] = (total, stream)
    device.pool_of[begin, begin + total] = pool


def _place_in_pools(device: _Device) -> None:
    def placed(row: _Row) -> _Row:
        if row.kind not in (EventType.ALLOC, *_SEGMENT):
            return row
        pools = [pool for (begin, end), pool in device.pool_of.items() if begin <= row.address < end]
        return row._replace(pool=pools[0] if pools else 0)

    device.rows = [placed(row) for row in device.rows]
    device.before = [placed(row) for row in device.before]


def _segments_before(device: _Device) -> list[_Row]:
    """Return the rows of the segments that are older than the recording."""
    events = [(row.kind, row.address, row.size, row.stream) for row in device.rows if row.kind in _SEGMENT]
    held = sorted(device.segments.before(events).at.items())
    return [
        _Row(EventType.RESERVE, -1, size, stream, -1, address, pool=_pool_at(device, address))
        for address, (size, stream) in held
    ]


def _pool_at(device: _Device, address: int) -> int:
    """Return the pool of a segment older than the recording: that at the end, or that of its release."""
    for row in device.rows:
        if row.kind == EventType.RELEASE and row.address <= address < row.address + row.size:
            return row.pool
        if row.kind == EventType.RESERVE and row.address <= address < row.address + row.size:
            break
    pools = [pool for (begin, end), pool in device.pool_of.items() if begin <= address < end]
    return pools[0] if pools else 0


def _joined(devices: list[_Device], live: list[int]) -> Trace:
    """Return all devices' events in order of time, older memory first, and marks before events."""
    placed: list[tuple[int, int, int, int, _Row]] = []  # clock, device, of marks 0, its first buffer, row
    first = 0
    for at, device in enumerate(devices):
        begin = min((row.time for row in device.rows), default=0)
        placed += [(-1, at, 0, first, row._replace(time=begin)) for row in device.before]
        for order, rows in ((0, device.marks), (1, device.rows)):
            clock = 0
            for row in rows:
                clock = max(clock, row.time)
                placed.append((clock, at, order, first, row))
        first += device.buffers
    placed.sort(key=lambda one: one[:3])
    rows = [row._replace(buffer=row.buffer + first * (row.buffer >= 0)) for *_, first, row in placed]
    names: dict[str, int] = {}

    def numbers(texts: list[str]) -> list[int]:
        return [names.setdefault(text, len(names)) if text else -1 for text in texts]

    free = [row.address for row in rows if row.kind == EventType.REFUSED]
    return Trace.of(
        [row.kind for row in rows],
        [row.buffer for row in rows],
        [row.size for row in rows],
        stream=[row.stream for row in rows],
        time_ns=[row.time * 1000 for row in rows],
        operation=numbers([row.place[0] for row in rows]),
        frame=numbers([row.place[1] for row in rows]),
        stack=numbers([row.place[2] for row in rows]),
        module=numbers([row.module for row in rows]),
        category=numbers([row.range for row in rows]),
        pool=[row.pool for row in rows],
        address=[-1 if row.kind == EventType.REFUSED else row.address for row in rows],
        device=[one[1] for one in placed],
        names=list(names),
        metadata=_metadata(devices, live, free),
    )


def _metadata(devices: list[_Device], live: list[int], free: list[int]) -> dict[str, str]:
    skipped = sum((device.skipped for device in devices), Counter[str]())
    said = {
        "framework": "pytorch",
        "recorder": "snapshot",
        "alignment": "512",
        "alive_before": str(sum(row.kind == EventType.ALLOC for device in devices for row in device.before)),
    }
    for at, device in enumerate(devices):
        reserved = sum(row.size for row in device.before if row.kind == EventType.RESERVE)
        before = live[at] > 0 or reserved > 0
        said[f"history.{at}"] = "whole" if not before else "window" if len(device.rows) > 1 else "absent"
        if before:
            said |= {f"live_before.{at}": str(live[at]), f"reserved_before.{at}": str(reserved)}
    if any(value >= 0 for value in free):
        said["refused.device_free"] = ",".join(map(str, free))
    return said | {f"action.{name}": str(count) for name, count in sorted(skipped.items())}


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
    """Assert equal rows, texts and metadata, except for settings."""
    for name in set(COLUMNS) - set(NAMED):
        np.testing.assert_array_equal(getattr(native, name), getattr(model, name), name)
    for name in NAMED:
        texts = [
            [one.names[i] if i >= 0 else "" for i in getattr(one, name).tolist()] for one in (native, model)
        ]
        assert texts[0] == texts[1]
    left_out = ("setting.", "action.annotation")
    metadata = [
        {k: v for k, v in one.metadata.items() if not k.startswith(left_out)} for one in (native, model)
    ]
    assert metadata[0] == metadata[1]
