"""Memory snapshots of PyTorch as traces."""

from __future__ import annotations

import gzip
import json
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from living_model import Living as Model
from snapshot_model import assert_same
from snapshots import event, segment, snapshot, stored

from traces import EventType, TraceError
from traces._core import Living, Refused
from traces.completeness import History, completeness, device_free
from traces.formats.registry import sniff
from traces.formats.snapshot import read_snapshot
from traces.iterations.windows import iteration_marks
from traces.read import read


def test_buffer_lives_until_free_completed(tmp_path: Path) -> None:
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


def test_operation_and_source_line_are_read_from_the_stack_without_folders(tmp_path: Path) -> None:
    frames = [
        {"name": "at::_ops::mul_Tensor::call(at::Tensor)", "filename": "??", "line": 0},
        {"name": "step", "filename": "/x/site-packages/torch/optim/sgd.py", "line": 7},
        {"name": "train", "filename": "/home/me/train.py", "line": 12},
    ]
    events = [event("alloc", 512, 1, frames=frames), event("alloc", 1024, 1)]
    trace = read_snapshot(stored(tmp_path / "s", events))
    assert [trace.names[i] for i in (trace.operation[0], trace.frame[0])] == ["mul_Tensor", "train.py:12"]
    assert (trace.operation[1], trace.frame[1]) == (-1, -1)


def test_stacks_of_buffers_without_events_are_read_from_blocks(tmp_path: Path) -> None:
    """PyTorch before 2.1 keeps the stacks in the history of the block."""
    frames = [{"name": "f", "filename": "a.py", "line": 3}]
    held = segment((0, 512, 400, "active_allocated"), (512, 512, 300, "active_allocated"))
    held["blocks"][0]["frames"] = frames
    held["blocks"][1]["history"] = [{"addr": 512, "real_size": 300, "frames": frames}]
    trace = read_snapshot(stored(tmp_path / "s", [], segments=[held]))
    alloc = trace.kind == EventType.ALLOC
    assert [trace.names[at] for at in trace.frame[alloc].tolist()] == ["a.py:3"] * 2
    assert (trace.stack[alloc] >= 0).all()


def test_out_of_memory_events_are_refused_requests(tmp_path: Path) -> None:
    frames = [{"name": "f", "filename": "a.py", "line": 3}]
    refused = {"action": "oom", "size": 900, "stream": 3, "time_us": 2, "frames": frames, "device_free": 70}
    unknown = {"action": "oom", "size": 800, "stream": 3, "time_us": 3, "frames": []}
    trace = read_snapshot(stored(tmp_path / "s", [event("alloc", 512, 1, time=1), refused, unknown]))
    assert trace.kind.tolist() == [EventType.ALLOC, EventType.REFUSED, EventType.REFUSED]
    assert trace.size.tolist() == [1, 900, 800]
    assert trace.names[trace.frame[1]] == "a.py:3"
    assert device_free(trace).tolist() == [70, -1]


def annotation(name: str, stage: str, time: int, device: int = 0) -> dict[str, Any]:
    return {"name": name, "stage": stage, "time_us": time, "device": device}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_annotated_steps_divide_iterations_once_for_all_devices(
    order: tuple[int, int], tmp_path: Path
) -> None:
    """PyTorch annotates per device; an optimizer's step ends an iteration, a profiler's begins one."""
    devices = [[event("alloc", 512, 1, time=5)], [event("alloc", 512, 1, time=5)]]
    notes = [
        annotation(name, stage, time, device)
        for name, stage, time in (
            ("ProfilerStep#3", "START", 1),
            ("Optimizer.step#AdamW.step", "START", 6),
            ("Optimizer.step#AdamW.step", "END", 8),
            ("ProfilerStep#3", "END", 9),
        )
        for device in order
    ]
    trace = read_snapshot(stored(tmp_path / "s", *devices, external_annotations=notes))
    steps = iteration_marks(trace, automatic_marks=True)
    assert trace.time_ns[steps].tolist() == [1000, 8000]
    assert len(trace.on_device(1)) == 5  # an alloc, a range's two ends, and the steps of all devices


@pytest.mark.parametrize(
    ("events", "history", "before"),
    [
        ([], History.ABSENT, (400, 512)),
        ([event("free_completed", 4096, 70, 1)], History.ABSENT, (470, 512)),
        ([event("free_completed", at, 35, at) for at in (4096, 8192)], History.WINDOW, (470, 512)),
        ([event("segment_alloc", 0, 512, 1), event("alloc", 0, 400, 2)], History.WHOLE, (0, 0)),
    ],
)
def test_completeness_is_the_recorded_part_of_the_history(
    events: list[Any], history: History, before: tuple[int, int], tmp_path: Path
) -> None:
    held = segment((0, 512, 400, "active_allocated"))
    trace = read_snapshot(stored(tmp_path / "s", events, segments=[held]))
    known = completeness(trace, 0)
    assert (known.history, (known.live_before_bytes, known.reserved_before_bytes)) == (history, before)


def test_list_of_segments_is_a_snapshot_without_events(tmp_path: Path) -> None:
    """``torch.cuda.memory_snapshot`` returns such a list; segments name their devices."""
    path = tmp_path / "s"
    held = [segment((0, 512, 400, "active_allocated"), device=at) for at in (0, 3)]
    path.write_bytes(pickle.dumps(held, 4))
    trace = read_snapshot(path)
    assert (trace.devices, trace.load().tolist()[-1]) == ((0, 3), 800)
    assert completeness(trace, 3).history is History.ABSENT


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_compression_is_named(damage: str, tmp_path: Path) -> None:
    events = [event("alloc", 512 * at, 1, time=at) for at in range(4000)]
    raw = bytearray(gzip.compress(stored(tmp_path / "s", events).read_bytes()))
    if damage == "cut":
        del raw[len(raw) // 2 :]
    else:
        raw[len(raw) // 2] ^= 255
    path = tmp_path / "s.gz"
    path.write_bytes(raw)
    with pytest.raises(TraceError, match=r"s\.gz: .*(gzip|damaged|truncated)"):
        read(path)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([event("alloc", 512, 1), event("alloc", 512, 1)], "event 1: address 0x200 is allocated again"),
        ([event("alloc", 512, -1)], "event 0: size -1 is out of range"),
        ([event("alloc", 512, 2**70)], "size is out of range"),
        ([event("alloc", 512, 2**52 + 1)], "size 4503599627370497 is out of range"),
        ([event("alloc", 512, "big")], "size is 'big', not a number"),  # type: ignore[arg-type]
        ([event("alloc", 512, 1, time=-5)], "time_us -5"),
        ([event("alloc", 512, "a\nb" * 40)], r"size is 'a\?ba\?b"),  # type: ignore[arg-type]
        ([event("alloc", [], 1)], "addr is a list, not a number"),  # type: ignore[arg-type]
        ([event("free", 512, 1)] * 2, "address 0x200 is freed again without an alloc"),
        ([event("alloc", 512, 99), event("alloc", 610, 1)], "event 1: address 0x262 is allocated over a"),
        ([event("alloc", 512, 99), event("free", 500, 13)], "event 1: address 0x1f4 is freed, but overlaps"),
        ([event("alloc", 512, 1, frames=[3])], "a number where a dict belongs"),
        ([{"action": "alloc"}], "addr is missing"),
        ([7], "a number where a dict belongs"),
    ],
)
def test_invalid_events_are_reported(tmp_path: Path, events: list[Any], reason: str) -> None:
    with pytest.raises(TraceError, match=reason) as caught:
        read_snapshot(stored(tmp_path / "s", events))
    assert str(caught.value).startswith(f"{tmp_path / 's'}: device 0, event ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [[], [5], [[]], {}, {"segments": 3, "device_traces": []}])
def test_other_plain_pickles_are_refused(tmp_path: Path, data: object) -> None:
    path = tmp_path / "s"
    path.write_bytes(pickle.dumps(data, 4))
    with pytest.raises(TraceError, match=r"not a memory snapshot|belongs"):
        read_snapshot(path)


HELD = segment((0, 512, 400, "active_allocated"))


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        ([HELD | {"device": 1}], "segment 0: a segment of device 1, of 1 devices"),
        ([HELD | {"device": -1}], "segment 0: device -1 is out of range"),
        ([HELD, HELD], "segment 1: a segment overlaps another"),
        ([segment((512, 1024, 0, "inactive")), segment((0, 513, 0, "inactive"))], "segment 1: .*overlaps"),
        ([segment((0, 513, 0, "inactive")), segment((512, 1024, 0, "inactive"))], "segment 1: .*overlaps"),
        ([segment((4096, 512, 1, "active_allocated"))], "segment 0: address 0x1000 is freed, and alive"),
        ([HELD | {"total_size": None}], "segment 0: total_size is None, not a number"),
        ([HELD | {"blocks": [3]}], "segment 0: a number where a dict belongs"),
        ([HELD | {"blocks": 3}], "segment 0: a number where a list belongs"),
    ],
)
def test_invalid_segments_are_reported(tmp_path: Path, segments: list[Any], reason: str) -> None:
    path = stored(tmp_path / "s", [event("free_completed", 4096, 1)], segments=segments)
    with pytest.raises(TraceError, match=reason):
        read_snapshot(path)
    skipped = Counter[str]()
    read(path, skipped=skipped)
    assert skipped.total() == 1


def test_settings_and_expandable_segments_are_metadata(tmp_path: Path) -> None:
    divisions = {str(2**i): 0 for i in range(16)}
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "garbage_collection_threshold": 0.8,
        "max_split_size": -1,
        "expandable_segments": True,
        "roundup_power2_divisions": divisions,
        "long": "x" * 1001,
        "deep": {"a": {"b": {}}},
        "n" * 100: (1, 2),
    }
    path = stored(tmp_path / "s", [], segments=[HELD | {"is_expandable": True}], allocator_settings=settings)
    metadata = read_snapshot(path).metadata
    assert {name: text for name, text in metadata.items() if name.startswith("setting.")} == {
        "setting.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "setting.garbage_collection_threshold": "0.8",
        "setting.max_split_size": "-1",
        "setting.expandable_segments": "true",
        "setting.roundup_power2_divisions": json.dumps(divisions, separators=(",", ":")),
        "setting.deep": '{"a":null}',
        f"setting.{'n' * 40}": "null",
    }
    assert metadata["expandable"] == "1"
    assert read_snapshot(stored(tmp_path / "t", [], segments=[HELD])).metadata["expandable"] == "0"


ANYTHING = {
    "float": 1.5,
    "bool": [True, False, None],
    "tuple": (0, (1, "x", 2, 3)),
    "dict": {"a": {(1, 2): {3: []}}, None: 0, 2.5: 1},
    "bytes": [b"x", b"y" * 300, b"z" * 70_000],
    "sets": [set(), {1, 2, "three"}, frozenset({(4, 5)})],
    "large": [2**63, -(2**63), 2**2100, -(2**59) - 1],
    "text": ["x" * 70_000, "x" * 300_000],
    "name": ["not a frame", {"filename": None, "line": None}],
    "action": {"action": 3},
}


@pytest.mark.parametrize("protocol", [4, 5])
def test_unknown_keys_are_skipped_with_any_content(tmp_path: Path, protocol: int) -> None:
    more = {f"new_{name}": value for name, value in ANYTHING.items()}
    if protocol == 5:
        more["bytearray"] = bytearray(b"w" * 9)  # older protocols make one by a call
    frames = [{"name": "at::_ops::mul::call", "filename": "a.py", "line": 3} | more]
    events = [event("alloc", 0, 1, frames=frames) | more, event("new", 0, 1) | more, {"action": None} | more]
    held = HELD | {"blocks": [HELD["blocks"][0] | more]} | more
    path = tmp_path / "s"
    path.write_bytes(pickle.dumps(snapshot(events, segments=[held], **more), protocol))
    trace = read_snapshot(path)
    assert trace.names[:2] == ("mul", "a.py:3")
    assert (trace.metadata["action.new"], trace.metadata["action.None"]) == ("1", "1")
    assert trace.load().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([event("alloc", 512, 8)], "alive at the end, but overlaps another"),
        ([event("free_completed", 0, 8)], "freed, and alive at the end"),
    ],
)
def test_living_blocks_at_the_end_must_agree_with_the_events(
    events: list[Any], reason: str, tmp_path: Path
) -> None:
    held = segment((0, 1024, 513, "active_allocated"), (1024, 512, 512, "active_allocated"))
    path = stored(tmp_path / "s", events, segments=[held])
    with pytest.raises(TraceError, match=f"segment 0: address 0x0 is {reason}"):
        read_snapshot(path)
    skipped = Counter[str]()
    read_snapshot(path, skipped=skipped).validate()
    assert skipped == {reason: 1}


WRONG = {
    "allocated again without a free": lambda: event("alloc", 0, 7),
    "freed again without an alloc": lambda: event("free_completed", 512, 1),
    "allocated over a buffer that is alive": lambda: event("alloc", 3, 1),
    "size is out of range": lambda: event("alloc", 4096, -1),
    "addr is missing": lambda: {"action": "segment_free"},
    "time_us is not a number": lambda: event("alloc", 4096, 1, time_us="now"),
    "line is not a number": lambda: event("alloc", 4096, 1, frames=[{"filename": "a.py", "line": "x"}]),
    "no dict where one belongs": lambda: "an event",
    "no list where one belongs": lambda: event("alloc", 4096, 1, frames=5),
}


@given(wrong=st.lists(st.sampled_from(sorted(WRONG))), at=st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_lenient_reader_skips_invalid_events(tmp_path: Path, wrong: list[str], at: random.Random) -> None:
    right: list[Any] = [
        event("alloc", 0, 5, 1),
        event("free_completed", 512, 1, 2),
        event("alloc", 1024, 2, 3),
    ]
    mixed = [*right]
    for kind in wrong:
        mixed.insert(at.randint(2, len(mixed)), WRONG[kind]())
    skipped = Counter[str]()
    lenient = read_snapshot(stored(tmp_path / "s", mixed), skipped=skipped)
    assert_same(lenient, read_snapshot(stored(tmp_path / "t", right)))
    assert skipped == Counter(wrong)


LARGEST = 1 << 62
NUMBERS = st.integers(0, 12) | st.sampled_from([LARGEST - 3, LARGEST - 1, LARGEST])
EVENTS = st.lists(st.tuples(st.booleans(), NUMBERS, NUMBERS), max_size=40)


def told(living: Living | Model, *, alloc: bool, address: int, size: int, buffer: int) -> str | int | None:
    """Return the outcome of an event: the buffer, or the reason of the refusal."""
    try:
        return living.alloc(address, size, buffer) if alloc else living.free(address, size, buffer)
    except Refused as error:
        return f"address {address:#x} is {error}"
    except TraceError as error:
        return error.reason


@given(events=EVENTS)
@settings(max_examples=250)
def test_living_buffers_match_the_model(events: list[tuple[bool, int, int]]) -> None:
    """Ranges touch, overlap, contain each other, are empty, and end at the last possible address."""
    living, model = Living(), Model()
    for buffer, (alloc, address, size) in enumerate(events):
        found = [told(one, alloc=alloc, address=address, size=size, buffer=buffer) for one in (living, model)]
        assert found[0] == found[1]
