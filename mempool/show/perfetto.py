"""Export to Perfetto (ui.perfetto.dev): load and reserved bytes as counters, buffers and ranges as slices.

The format is Chrome's JSON, "Trace Event Format", which Perfetto supports.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool.show.packed_columns import clean
from mempool.show.thinning import load_of
from traces.files import atomic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _typeshed import StrPath
    from numpy.typing import NDArray

    from mempool.show.scene import Scene
    from mempool.show.timeline import Timeline
    from mempool.show.view import View

#: Most buffers of a timeline with a slice, by bytes times time; counters include all buffers.
_MOST_SLICES = 50_000
_MOST_POINTS = 20_000


def write_perfetto(scene: Scene, path: StrPath, *, frames: bool = False) -> int:
    """Write a scene's timelines atomically; gzipped if the name ends in ``.gz``.

    Time is the recorded host clock, else one microsecond per event.

    Args:
        scene: the scene to write.
        path: the file.
        frames: include source lines.

    Returns:
        The number of slices of buffers, one per written piece.

    Raises:
        OSError: the file cannot be written.
    """
    count = 0
    with atomic(path) as beside, beside.open("wb") as raw:
        # Without time and name in the header, so that the file is reproducible.
        squeezed = gzip.GzipFile("", "wb", 6, raw, mtime=0) if str(path).endswith(".gz") else None
        file = squeezed or raw
        file.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
        between = b""
        for event in _events(scene, frames=frames):
            file.write(between + json.dumps(event, separators=(",", ":")).encode("ascii"))
            between = b",\n"
            count += event["ph"] == "b"
        file.write(b"\n]}\n")
        if squeezed is not None:
            squeezed.close()
    return count


def _events(scene: Scene, *, frames: bool) -> Iterator[dict[str, Any]]:
    for process, timeline in enumerate(scene.timelines, 1):
        title = clean(timeline.title)
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}}
        times, loads, _ = load_of(timeline)
        yield from _counter(process, "load", _micros(timeline, times), loads)
        for view in scene.views:
            if scene.timelines[view.timeline] is timeline and len(view.segments.size):
                times, held = _reserved(view)
                yield from _counter(process, f"reserved, {clean(view.title)}", _micros(timeline, times), held)
        yield from _noted(process, timeline)
        yield from _slices(process, timeline, frames=frames)


def _noted(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield ranges as nested slices, marks and refused requests as instants."""
    annotations = timeline.annotations
    ranges = np.sort(np.argsort(annotations.begin - annotations.end, kind="stable")[:_MOST_SLICES])
    begin, end = _micros(timeline, annotations.begin[ranges]), _micros(timeline, annotations.end[ranges])
    for name, first, lasts in zip(
        annotations.range_name[ranges], begin.tolist(), (end - begin).tolist(), strict=True
    ):
        called = _name(timeline, name, "range")
        yield {"ph": "X", "pid": process, "tid": 0, "ts": first, "dur": lasts, "cat": "range", "name": called}
    marks, refused = annotations.mark[:_MOST_SLICES], annotations.refused[:_MOST_SLICES]
    instant = {"ph": "i", "pid": process, "tid": 0, "s": "p"}
    for name, at in zip(annotations.mark_name, _micros(timeline, marks).tolist(), strict=False):
        yield instant | {"ts": at, "name": _name(timeline, name, "mark")}
    for size, at in zip(annotations.asked.tolist(), _micros(timeline, refused).tolist(), strict=False):
        yield instant | {"ts": at, "name": "out of memory", "args": {"size_bytes": size}}


def _name(timeline: Timeline, name: int, unknown: str) -> str:
    return clean(timeline.names[name]) if name >= 0 else unknown


def _counter(
    process: int, name: str, micros: NDArray[np.float64], values: NDArray[np.int64]
) -> Iterator[dict[str, Any]]:
    for at, value in zip(micros.tolist(), values.tolist(), strict=True):
        yield {"ph": "C", "pid": process, "name": name, "ts": at, "args": {"bytes": value}}


def _reserved(view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    segments = view.segments
    times = np.concatenate([segments.start, segments.end])
    order = np.argsort(times, kind="stable")
    held = np.cumsum(np.concatenate([segments.size, -segments.size])[order])
    last = np.flatnonzero(np.diff(times[order], append=-1))
    last = last[:: len(last) // _MOST_POINTS + 1]
    return times[order][last], held[last]


def _slices(process: int, timeline: Timeline, *, frames: bool) -> Iterator[dict[str, Any]]:
    area = timeline.size[timeline.owner] * (timeline.end - timeline.start).astype(np.float64)
    some = np.sort(np.argsort(-area, kind="stable")[:_MOST_SLICES])
    begin, end = (_micros(timeline, column[some]).tolist() for column in (timeline.start, timeline.end))
    for piece, row, first, last in zip(some.tolist(), timeline.owner[some].tolist(), begin, end, strict=True):
        said = {"buffer": row, "size_bytes": int(timeline.size[row]), "stream": int(timeline.stream[row])}
        operation, frame = int(timeline.operation[row]), int(timeline.frame[row])
        if frames and frame >= 0:
            said["frame"] = clean(timeline.names[frame])
        name = _name(timeline, operation, f"buffer {row}")
        same = {"pid": process, "tid": 0, "cat": "buffer", "id": piece, "name": name}
        yield {"ph": "b", "ts": first, "args": said, **same}
        yield {"ph": "e", "ts": last, **same}


def _micros(timeline: Timeline, times: NDArray[np.int64]) -> NDArray[np.float64]:
    if timeline.clock is None:
        return times.astype(np.float64)
    at, ns = timeline.clock
    micros: NDArray[np.float64] = np.interp(times.astype(np.float64), at, ns - ns[0]) / 1e3
    return micros
