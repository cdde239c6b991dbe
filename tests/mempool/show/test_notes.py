"""Refused requests, marks and ranges of a timeline, and the drawn part of a history."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from shown import Packed

from mempool.show import content, scene_of
from mempool.show.annotations import annotations_of
from traces import EventType, Trace
from traces.trace import RANGE_BEGIN, RANGE_END

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
    """Two devices with a buffer each, and refused requests of 900, 800 and 70 bytes."""
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


def test_deep_and_many_stacks_make_no_huge_page() -> None:
    count = 3_000
    names = ["\n".join(f"{k}_{depth}.py:1 f" * 20 for depth in range(500)) for k in range(count)]
    trace = Trace.of([A] * count, np.arange(count), 1, stack=np.arange(count), names=names)
    text = content.content_of(scene_of(trace), frames=True)[0]
    assert len(text) < 25_000_000
    stack = Packed(text).said["timelines"][0]["stack"]
    assert max(Packed(text).column(stack["depth"])) == 300


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
