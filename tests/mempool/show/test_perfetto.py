"""Perfetto files: well-formed events, counters equal to the load, and a bounded number of events."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from shown import four_buffers

from mempool.show import perfetto, scene_of, write_perfetto
from solvers import peak_load
from traces import Buffers, EventType, Trace, buffers_of
from traces.trace import RANGE_BEGIN, RANGE_END

if TYPE_CHECKING:
    from pathlib import Path


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


def test_perfetto_file_is_deterministic(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        write_perfetto(scene_of(four_buffers()), tmp_path / name)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
