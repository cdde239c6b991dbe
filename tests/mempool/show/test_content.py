"""Contents of a page: columns, notes, views and timelines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from shown import Packed, four_buffers

from mempool.show import Scene, content, perfetto, scene_of, write_perfetto
from mempool.show.annotations import annotations_of
from mempool.show.packed_columns import Packer, clean
from mempool.show.thinning import density_of_small_pieces, load_of
from mempool.show.timeline import timeline_of
from mempool.show.view import recorded_view
from solvers import Plan, Status, load_curve, peak_load
from traces import Buffers, EventType, Trace, buffers_of
from traces.trace import RANGE_BEGIN, RANGE_END

NUMBERS = st.lists(st.integers(-1, 2**62), max_size=30)


@given(NUMBERS, NUMBERS)
def test_columns_round_trip(plain: list[int], ascending: list[int]) -> None:
    ascending.sort()
    packer = Packer()
    said = [packer.column(plain), packer.column(ascending, delta=True)]
    back = Packed(packer.packed({"columns": said}))
    assert [back.column(one).tolist() for one in back.said["columns"]] == [plain, ascending]


def test_source_lines_are_included_only_on_request() -> None:
    scene = scene_of(four_buffers())
    assert "one.py" not in str(Packed(content.content_of(scene)[0]).said)
    frame = Packed(content.content_of(scene, frames=True)[0]).said["timelines"][0]["frame"]
    assert sorted(frame["names"]) == ["four.py:4", "one.py:1", "three.py:3", "two.py:2"]


def many(count: int) -> Scene:
    rng = np.random.default_rng(1)
    start = np.sort(rng.integers(0, 10**6, count))
    buffers = Buffers.of(start, start + rng.integers(1, 100, count), rng.integers(1, 10**6, count))
    return scene_of(buffers)


def test_largest_pieces_are_kept_beyond_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "MOST_NUMBERS", 400)
    scene = many(1000)
    text, counts = content.content_of(scene)
    assert counts == {"pieces": 1000, "drawn": 100}
    back = Packed(text)
    (timeline,), (view,) = back.said["timelines"], back.said["views"]
    area = back.column(timeline["size"]) * back.column(timeline["length"])
    whole = scene.timelines[0]
    areas = whole.size[whole.owner] * (whole.end - whole.start)
    assert sorted(area.tolist()) == sorted(areas.tolist())[-100:]
    assert (np.diff(back.column(timeline["start"])) >= 0).all()
    assert timeline["load"]["peak"][1] == load_of(whole)[1].max()
    assert back.column(view["rest"]["of"]).any()


def test_page_never_exceeds_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "MOST_CHARACTERS", 250_000)
    text, counts = content.content_of(many(40_000))
    assert len(text) <= 250_000
    assert 1000 < counts["drawn"] < 40_000


def test_picture_of_the_rest_has_the_area_of_the_rest() -> None:
    rng = np.random.default_rng(2)
    start = np.append(0, rng.integers(0, 10**6, 1000))
    size = np.append(10**9, rng.integers(1, 10**6, 1000))
    scene = scene_of(Buffers.of(start, start + np.append(10**6, rng.integers(1, 3000, 1000)), size))
    (timeline,), (view,) = scene.timelines, scene.views
    large = timeline.size[timeline.owner] == 10**9
    picture = density_of_small_pieces(timeline, view, np.flatnonzero(large)) / 255
    area = (timeline.size[timeline.owner] * (timeline.end - timeline.start))[~large].sum()
    cell = view.top / 256 * (timeline.end.max() - timeline.start.min()) / 1024
    assert picture.sum() * cell == pytest.approx(area, rel=0.05)  # cells are rounded up


@pytest.mark.parametrize(
    ("name", "shown"),
    [("plain", "plain"), ("a\x00b\u202ec\x1b", "a\ufffdb\ufffdc\ufffd"), ("x" * 10**7, "x" * 299 + "…")],
    ids=["plain", "hostile", "huge"],
)
def test_names_are_cleaned(name: str, shown: str) -> None:
    """Control characters and marks that change the direction of text are removed, and names are cut."""
    assert clean(name) == shown


def test_many_huge_names_make_no_huge_page() -> None:
    count = 30_000
    names = [f"{k}" + "é" * 400 for k in range(count)]
    trace = Trace.of([0] * count, np.arange(count), 1, operation=np.arange(count), names=names)
    assert len(content.content_of(scene_of(trace))[0]) < 25_000_000


@pytest.mark.parametrize(
    "buffers", [Buffers.of([], [], []), Buffers.of([0], [1], [0]), Buffers.of([0], [0], [9])]
)
def test_nothing_to_draw_is_a_page_too(buffers: Buffers) -> None:
    text, counts = content.content_of(scene_of(buffers))
    assert counts == {"pieces": 0, "drawn": 0}
    assert Packed(text).said["timelines"][0]["load"]["peak"] == [0, 0]


A, F, MARK, RESERVE, REFUSED = (
    EventType.ALLOC,
    EventType.FREE,
    EventType.MARK,
    EventType.RESERVE,
    EventType.REFUSED,
)
NAMES = (RANGE_BEGIN, RANGE_END, "forward", "layer", "step")


def marks(*rows: tuple[int, int]) -> Trace:
    """Marks of (category, operation), as indices into NAMES."""
    category, operation = zip(*rows, strict=True)
    return Trace.of([MARK] * len(rows), -1, category=category, operation=operation, names=NAMES)


def test_nested_ranges_have_increasing_depth() -> None:
    notes = annotations_of(marks((0, 2), (0, 3), (1, 3), (0, 3), (1, 3), (1, 2)), None)
    ranges = zip(notes.begin.tolist(), notes.end.tolist(), notes.depth.tolist(), strict=True)
    assert list(ranges) == [(0, 5, 0), (1, 2, 1), (3, 4, 1)]
    assert [NAMES[k] for k in notes.range_name] == ["forward", "layer", "layer"]
    assert len(notes.mark) == 0


def test_truncated_ranges_extend_to_the_ends_or_are_ignored() -> None:
    notes = annotations_of(marks((1, 3), (0, 2), (0, 3)), None)
    assert (notes.begin.tolist(), notes.end.tolist(), notes.depth.tolist()) == ([1, 2], [3, 3], [0, 1])


def ran_out(**more: Any) -> Trace:
    """A trace of two devices with a buffer each, and refused requests of 900, 800 and 70 bytes."""
    columns: dict[str, Any] = {
        "kind": [A, A, REFUSED, REFUSED, REFUSED], "buffer": [0, 1, -1, -1, -1],
        "size": [100, 400, 900, 800, 70], "device": [0, 1, 0, 1, 0], "address": [0, 0, -1, -1, -1],
        "stack": [2, -1, 3, -1, 2], "frame": [0, -1, 1, -1, 0],
        "names": ("a.py:1", "b.py:2", "a.py:1 f\nmain.py:9 main", "b.py:2 g\nmain.py:9 main"),
        "metadata": {"refused.device_free": "11,-1,12"},
    }  # fmt: skip
    return Trace.of(**columns | more)


def test_refused_requests_belong_to_their_device() -> None:
    first, second = scene_of(ran_out()).timelines
    assert (first.annotations.refused.tolist(), first.annotations.asked.tolist()) == ([1, 2], [900, 70])
    assert (first.annotations.free.tolist(), second.annotations.free.tolist()) == ([11, 12], [-1])
    assert second.annotations.asked.tolist() == [800]


def test_stacks_are_packed_once_each_and_only_when_asked_for() -> None:
    scene = scene_of(ran_out())
    assert "main.py:9" not in str(Packed(content.content_of(scene)[0]).said)
    back = Packed(content.content_of(scene, frames=True)[0])
    refused = back.said["timelines"][0]["notes"]["refused"]
    stack = refused["stack"]
    assert sorted(stack["names"]) == ["a.py:1 f", "b.py:2 g", "main.py:9 main"]
    depth, lines = back.column(stack["depth"]), back.column(stack["lines"])
    table = [[stack["names"][k] for k in part] for part in np.split(lines, np.cumsum(depth)[:-1])]
    shown = [table[k] for k in back.column(stack["of"]).tolist()]
    assert shown == [["b.py:2 g", "main.py:9 main"], ["a.py:1 f", "main.py:9 main"]]
    assert back.said["timelines"][1]["stack"] is None


def test_excess_notes_are_reduced_to_the_largest() -> None:
    count = 20_000
    trace = Trace.of([REFUSED] * count, -1, np.arange(count))
    back = Packed(content.content_of(scene_of(trace))[0])
    refused = back.said["timelines"][0]["notes"]["refused"]
    assert refused["count"] == count
    assert back.column(refused["asked"]).tolist() == list(range(15_000, 20_000))


WINDOW = {"history.0": "window", "live_before.0": "300", "reserved_before.0": "1000"}


def cut(metadata: dict[str, str]) -> Trace:
    """A trace with a segment and two buffers of 300 bytes from before."""
    return Trace.of(
        [RESERVE, A, A, A, F], [-1, 0, 1, 2, 0], [1000, 100, 200, 50, 0], address=[0, 0, 100, 300, -1],
        metadata=metadata,
    )  # fmt: skip


def test_memory_from_before_the_recording_is_drawn_from_its_beginning() -> None:
    """No ramp is drawn, since the order is unknown. A whole history begins with the first event."""
    scene = scene_of(cut(WINDOW))
    (timeline,), (view,) = scene.timelines, scene.views
    assert (timeline.start.tolist(), timeline.end.tolist()) == ([3, 3, 3], [4, 5, 5])
    assert view.segments.start.tolist() == [3]
    assert (timeline.since, timeline.still) == (3, False)
    assert timeline.caveats[0].startswith("the first events are lost: 300 B were live, 1000 B reserved")
    whole = scene_of(cut({"history.0": "whole"})).timelines[0]
    assert (whole.start.tolist(), whole.since, whole.caveats) == ([1, 2, 3], 0, ())


def test_state_without_a_history_draws_the_end_only() -> None:
    trace = cut(WINDOW | {"history.0": "absent"})[:4]
    scene = scene_of(trace)
    (timeline,), (view,) = scene.timelines, scene.views
    assert set(timeline.start.tolist()) == {3}
    assert set(timeline.end.tolist()) == {4}
    assert (view.segments.start.tolist(), view.segments.end.tolist()) == ([3], [4])
    assert (timeline.still, scene.picture) == (True, "addresses")
    assert "only the state at the end is known" in timeline.caveats[0]
    with pytest.raises(ValueError, match="none were recorded"):
        scene_of(trace, allocators=["first_fit"])


ROWS = st.lists(
    st.tuples(st.one_of(st.integers(0, 2**62), st.integers(-1, 10**4)), st.integers(1, 2**40)), max_size=12
)


@given(ROWS)
def test_drawn_address_maps_back_to_the_real_address(rows: list[tuple[int, int]]) -> None:
    """The region below a drawn address gives the real address, and nothing is drawn above the top."""
    address = np.array([row[0] for row in rows], np.int64)
    size = np.array([row[1] for row in rows], np.int64)
    timeline = timeline_of(Buffers.of(np.zeros(len(rows), np.int64), 1, size), "")
    view = recorded_view("", 0, timeline, address)
    drawn, real = view.regions
    for at, low in zip(view.address.tolist(), address[timeline.owner].tolist(), strict=True):
        if low < 0:
            assert at == -1
            continue
        region = int(np.searchsorted(drawn, at, side="right")) - 1
        assert at - int(drawn[region]) + int(real[region]) == low
    ends = view.address + timeline.size[timeline.owner]
    assert ends[view.address >= 0].max(initial=0) <= view.top


def test_large_hole_between_addresses_is_left_out() -> None:
    timeline = timeline_of(Buffers.of([0, 0], [1, 1], [100, 50]), "")
    view = recorded_view("", 0, timeline, np.array([2**41, 2**40]))
    assert sorted(view.address.tolist()) == [0, 50]
    assert view.top == 150


@pytest.mark.parametrize("sizes", [(2**62, 2**62), (2**61, 2**61 + 1)])
def test_byte_sums_beyond_the_address_space_are_an_error(sizes: tuple[int, int]) -> None:
    """Sums over a file never wrap around: neither of segment sizes nor of segment addresses."""
    trace = Trace.of(
        [EventType.ALLOC, EventType.RESERVE, EventType.RESERVE],
        [0, -1, -1],
        [1, *sizes],
        address=[0, 2**61, 2**62 + 2**61],
    )
    with pytest.raises(ValueError, match=r"more than 2\*\*62"):
        scene_of(trace)


def test_each_iteration_uses_its_own_column() -> None:
    """A buffer longer than the period alternates between two addresses."""
    buffers = Buffers.of([0], [8], [10], period=5)
    plan = Plan(np.array([[0, 10]]), 20, 20, Status.OPTIMAL, "", 0, 0.0, "", period=5)
    scene = scene_of(buffers, plan=plan)
    (view,), (timeline,) = scene.views, scene.timelines
    for iteration, address in zip(timeline.iteration.tolist(), view.address.tolist(), strict=True):
        assert address == 10 * (iteration % 2)


def test_every_device_has_a_timeline() -> None:
    trace = four_buffers(device=[0, 1, 0, 0, 1, 1, 0, 1])
    scene = scene_of(trace)
    assert [timeline.title for timeline in scene.timelines] == ["device 0", "device 1"]
    assert [(view.title, view.timeline) for view in scene.views] == [("recorded", 0), ("recorded", 1)]


def test_trace_without_addresses_gets_a_plan() -> None:
    (view,) = scene_of(four_buffers(address=-1)).views
    assert (view.title, view.offsets) == ("planned, greedy", True)
    assert (view.address >= 0).all()


LINES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 99)), max_size=20)


@given(LINES)
def test_load_curve_equals_the_solvers_load_curve(rows: list[tuple[int, int, int]]) -> None:
    start = np.array([row[0] for row in rows], np.int64)
    buffers = Buffers.of(start, start + [row[1] for row in rows], [row[2] for row in rows])
    times, loads, (when, peak) = load_of(timeline_of(buffers, ""))
    theirs = load_curve(buffers)
    assert at(times, loads, 62) == at(*theirs, 62)
    assert peak == peak_load(buffers)
    assert at(times, loads, when + 1)[when] == peak


def at(times: NDArray[np.int64], loads: NDArray[np.int64], count: int) -> list[int]:
    """Return the load at each time."""
    before = np.searchsorted(times, np.arange(count), side="right")
    drawn: list[int] = np.append(0, loads)[before].tolist()
    return drawn


def test_long_load_curve_is_short_and_keeps_its_peak() -> None:
    rng = np.random.default_rng(0)
    start = np.arange(100_000)
    buffers = Buffers.of(start, start + rng.integers(1, 500, 100_000), rng.integers(1, 10**6, 100_000))
    times, loads, (when, peak) = load_of(timeline_of(buffers, ""))
    assert len(times) < 10_000
    assert (peak, peak) == (peak_load(buffers), loads.max())
    assert loads[times == when] == peak


def test_gap_of_a_buffer_is_not_drawn() -> None:
    buffers = Buffers.of([0], [10], [5], gaps=[(0, 3, 6)])
    timeline = timeline_of(buffers, "")
    assert (timeline.start.tolist(), timeline.end.tolist()) == ([0, 6], [3, 10])
    assert timeline.owner.tolist() == [0, 0]


def test_circle_is_drawn_in_the_steady_state() -> None:
    """One iteration more than the repetition of addresses, with the buffers of earlier iterations."""
    buffers = Buffers.of([1, 5], [4, 14], [10, 20], period=6)
    timeline = timeline_of(buffers, "", columns=2)
    drawn = list(zip(timeline.owner.tolist(), timeline.start.tolist(), timeline.end.tolist(), strict=True))
    of_second = sorted((start, end) for owner, start, end in drawn if owner == 1)
    assert of_second == [(0, 2), (0, 8), (5, 14), (11, 18), (17, 18)]
    assert sorted((s, e) for owner, s, e in drawn if owner == 0) == [(1, 4), (7, 10), (13, 16)]
    assert load_of(timeline)[2][1] == peak_load(buffers)


def test_timeline_clock_equals_the_clock_of_the_trace() -> None:
    trace = four_buffers()
    clock = timeline_of(buffers_of(trace), "", trace=trace).clock
    assert clock is not None
    assert clock.tolist() == [list(range(8)), list(range(0, 8_000_000, 1_000_000))]
    still = four_buffers(time_ns=0)
    assert timeline_of(buffers_of(still), "", trace=still).clock is None


def events(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    read: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return read


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_slices_and_counters_are_the_trace_s(tmp_path: Path, name: str) -> None:
    trace = four_buffers()
    assert write_perfetto(scene_of(trace), tmp_path / name) == 4
    read = events(tmp_path / name)
    begun = {one["id"]: one for one in read if one["ph"] == "b"}
    ended = {one["id"]: one for one in read if one["ph"] == "e"}
    assert begun.keys() == ended.keys()
    slices = {
        one["name"]: (one["ts"], ended[at]["ts"], one["args"]["size_bytes"]) for at, one in begun.items()
    }
    assert slices["three"] == (3000.0, 6000.0, 400 * 1024)
    load = [one["args"]["bytes"] for one in read if one["ph"] == "C" and one["name"] == "load"]
    assert (max(load), load[-1]) == (peak_load(buffers_of(trace)), 0)
    assert "one.py" not in json.dumps(read)


def test_frames_are_included_on_request(tmp_path: Path) -> None:
    write_perfetto(scene_of(four_buffers()), tmp_path / "t", frames=True)
    frames = {one["args"]["frame"] for one in events(tmp_path / "t") if one["ph"] == "b"}
    assert frames == {"one.py:1", "two.py:2", "three.py:3", "four.py:4"}


def test_reserved_memory_is_a_counter(tmp_path: Path) -> None:
    trace = Trace.of(
        [EventType.RESERVE, EventType.ALLOC, EventType.RESERVE, EventType.RELEASE],
        [-1, 0, -1, -1],
        [100, 7, 50, 50],
        address=[0, 0, 500, 500],
    )
    write_perfetto(scene_of(trace), tmp_path / "t")
    held = [one for one in events(tmp_path / "t") if one.get("name") == "reserved, recorded"]
    assert [(one["ts"], one["args"]["bytes"]) for one in held] == [(0, 100), (2, 150), (3, 100), (4, 0)]


def test_ranges_marks_and_refused_requests_are_events(tmp_path: Path) -> None:
    trace = Trace.of(
        [4, 0, 7, 4, 4], [-1, 0, -1, -1, -1], [0, 5, 70, 0, 0],
        category=[0, -1, -1, 1, -1], operation=[2, -1, -1, 2, -1], names=(RANGE_BEGIN, RANGE_END, "forward"),
    )  # fmt: skip
    write_perfetto(scene_of(trace), tmp_path / "t")
    read = events(tmp_path / "t")
    assert [(one["name"], one["ts"], one["dur"]) for one in read if one["ph"] == "X"] == [("forward", 0, 3)]
    assert [(one["name"], one["ts"]) for one in read if one["ph"] == "i"] == [
        ("mark", 4),
        ("out of memory", 2),
    ]
    assert next(one["args"] for one in read if one["name"] == "out of memory") == {"size_bytes": 70}


def test_number_of_events_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "_MOST_SLICES", 10)
    start = np.arange(50_000)
    scene = scene_of(Buffers.of(start, start + 100, start + 1))
    assert write_perfetto(scene, tmp_path / "t") == 10
    read = events(tmp_path / "t")
    assert min(one["args"]["buffer"] for one in read if one["ph"] == "b") == 49_990
    assert sum(one["ph"] == "C" for one in read) < 10_000
