"""Content of a page: the whole scene or, if too large, the largest pieces and a density of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool.show.packed_columns import MOST_NAMES, Packer, clean, ids_of, named, pools, stacks
from mempool.show.thinning import density_of_small_pieces, load_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mempool.show.scene import Scene
    from mempool.show.timeline import Timeline
    from mempool.show.view import View

#: Limits of a page, without Bokeh's script: number of pieces, and characters.
MOST_NUMBERS, MOST_CHARACTERS = 8_000_000, 22_000_000
#: Limits of a view's segments, and of a timeline's refused requests, marks and ranges each.
_MOST_SEGMENTS, _MOST_NOTES = 20_000, 5_000


def content_of(scene: Scene, *, frames: bool = False) -> tuple[str, dict[str, int]]:
    """Return the packed content of a page, with the numbers of pieces and of separately drawn pieces.

    Args:
        scene: the scene to show.
        frames: include source lines, which may be confidential.
    """
    most = MOST_NUMBERS // (3 * len(scene.timelines) + len(scene.views))
    while True:
        keeps = [_largest(timeline, most) for timeline in scene.timelines]
        text = _packed(scene, keeps, frames=frames)
        drawn = max(map(len, keeps))
        if len(text) <= MOST_CHARACTERS or drawn < 1000:
            break
        most = int(0.95 * drawn * MOST_CHARACTERS / len(text))
    pieces = sum(len(timeline.owner) for timeline in scene.timelines)
    return text, {"pieces": pieces, "drawn": sum(map(len, keeps))}


def _packed(scene: Scene, keeps: Sequence[NDArray[np.int64]], *, frames: bool) -> str:
    packer = Packer()
    said: dict[str, Any] = {"title": clean(scene.title), "timelines": [], "views": []}
    for timeline, keep in zip(scene.timelines, keeps, strict=True):
        said["timelines"].append(_timeline(packer, timeline, keep, frames=frames))
    said["opens"] = {"picture": scene.picture, "view": _opens(scene, said["timelines"])}
    for view in scene.views:
        said["views"].append(_view(packer, scene.timelines[view.timeline], view, keeps[view.timeline]))
    return packer.packed(said)


def _opens(scene: Scene, timelines: Sequence[dict[str, Any]]) -> int:
    """Return the initial view: as requested, else the first view of the timeline with the highest peak."""
    if scene.opens is not None:
        return scene.opens
    return max(range(len(scene.views)), key=lambda k: timelines[scene.views[k].timeline]["load"]["peak"][1])


def _largest(timeline: Timeline, most: int) -> NDArray[np.int64]:
    """Return the pieces with the largest products of bytes and time, in their order."""
    if len(timeline.owner) <= most:
        return np.arange(len(timeline.owner))
    area = timeline.size[timeline.owner] * (timeline.end - timeline.start).astype(np.float64)
    return np.sort(np.argpartition(area, -most)[-most:])


def _timeline(packer: Packer, timeline: Timeline, keep: NDArray[np.int64], *, frames: bool) -> dict[str, Any]:
    rows, owner = np.unique(timeline.owner[keep], return_inverse=True)
    plain = len(rows) == len(keep) and bool((owner == np.arange(len(keep))).all())
    streams, stream = np.unique(timeline.stream[rows], return_inverse=True)
    said: dict[str, Any] = {
        "title": clean(timeline.title),
        "pieces": len(timeline.owner),
        "period": timeline.period,
        "parts": not plain and _in_parts(timeline),
        "persistent": timeline.persistent,
        "start": packer.column(timeline.start[keep], delta=True),
        "length": packer.column((timeline.end - timeline.start)[keep]),
        "size": packer.column(timeline.size[rows]),
        "row": packer.column(rows, delta=True),
        "owner": None if plain else packer.column(owner),
        "streams": [str(one) for one in streams[:MOST_NAMES].tolist()],
        "stream": packer.column(np.where(stream < MOST_NAMES, stream, -1)),
        "operation": named(packer, timeline.operation[rows], timeline.names),
        "module": named(packer, timeline.module[rows], timeline.names),
        "category": named(packer, timeline.category[rows], timeline.names),
        "frame": named(packer, timeline.frame[rows], timeline.names) if frames else None,
        "stack": stacks(packer, timeline.stack[rows], timeline.names) if frames else None,
        "pool": pools(packer, timeline.pool[rows]),
        "ids": ids_of(timeline.ids, rows),
        "load": _load(packer, timeline),
        "small": _small(packer, timeline, keep),
        "clock": None,
        "since": timeline.since,
        "cut": timeline.cut,
        "still": timeline.still,
        "caveats": [clean(one) for one in timeline.caveats],
        "notes": _notes(packer, timeline, frames=frames),
    }
    if timeline.clock is not None:
        said["clock"] = [
            packer.column(timeline.clock[0], delta=True),
            packer.column(timeline.clock[1], delta=True),
        ]
    return said


def _in_parts(timeline: Timeline) -> bool:
    """Return true if any lifetime has several pieces, with gaps between them."""
    instance = np.stack([timeline.owner, timeline.iteration])
    return bool(np.unique(instance, axis=1).shape[1] < instance.shape[1])


def _load(packer: Packer, timeline: Timeline) -> dict[str, Any]:
    times, loads, peak = load_of(timeline)
    return {"time": packer.column(times, delta=True), "bytes": packer.column(loads), "peak": peak}


def _small(packer: Packer, timeline: Timeline, keep: NDArray[np.int64]) -> dict[str, Any] | None:
    """Pack the load of the pieces that are not drawn separately; None if all are."""
    left = np.delete(np.arange(len(timeline.owner)), keep)
    if len(left) == 0:
        return None
    some = replace(timeline, owner=timeline.owner[left], start=timeline.start[left], end=timeline.end[left])
    times, loads, _ = load_of(some)
    return {"time": packer.column(times, delta=True), "bytes": packer.column(loads)}


def _notes(packer: Packer, timeline: Timeline, *, frames: bool) -> dict[str, Any]:
    """Pack the largest refused requests, evenly spread marks, and the longest ranges."""
    notes, names = timeline.annotations, timeline.names
    refused = np.sort(np.argsort(-notes.asked, kind="stable")[:_MOST_NOTES])
    marks = np.unique(np.linspace(0, len(notes.mark) - 1, min(len(notes.mark), _MOST_NOTES)).astype(np.int64))
    ranges = np.sort(np.argsort(notes.begin - notes.end, kind="stable")[:_MOST_NOTES])
    own = {name: index[refused] for name, index in notes.named.items()}
    return {
        "refused": {
            "count": len(notes.refused),
            "time": packer.column(notes.refused[refused]),
            "asked": packer.column(notes.asked[refused]),
            "free": packer.column(notes.free[refused]),
            "operation": named(packer, own["operation"], names),
            "frame": named(packer, own["frame"], names) if frames else None,
            "stack": stacks(packer, own["stack"], names) if frames else None,
        },
        "marks": {
            "time": packer.column(notes.mark[marks]),
            "name": named(packer, notes.mark_name[marks], names),
        },
        "ranges": {
            "begin": packer.column(notes.begin[ranges]),
            "end": packer.column(notes.end[ranges]),
            "depth": packer.column(notes.depth[ranges]),
            "name": named(packer, notes.range_name[ranges], names),
        },
    }


def _view(packer: Packer, timeline: Timeline, view: View, keep: NDArray[np.int64]) -> dict[str, Any]:
    segments = view.segments
    area = segments.size * (segments.end - segments.start).astype(np.float64)
    some = np.sort(np.argsort(-area, kind="stable")[:_MOST_SEGMENTS])
    used = np.searchsorted(view.regions[0], view.address[keep], side="right") - 1
    regions = view.regions[:, np.unique(np.maximum(used, 0))]
    return {
        "title": clean(view.title),
        "timeline": view.timeline,
        "address": packer.column(view.address[keep]),
        "regions": [packer.column(row, delta=True) for row in regions],
        "top": view.top,
        "reserved": view.reserved_bytes,
        "offsets": view.offsets,
        "segments": {
            name: packer.column(getattr(segments, name)[some]) for name in ("address", "size", "start", "end")
        },
        "rest": _rest(packer, timeline, view, keep),
    }


def _rest(packer: Packer, timeline: Timeline, view: View, keep: NDArray[np.int64]) -> dict[str, Any] | None:
    if len(keep) == len(timeline.owner):
        return None
    picture = density_of_small_pieces(timeline, view, keep)
    return {
        "shape": picture.shape,
        "from": int(timeline.start[0]),
        "to": int(timeline.end.max()),
        "of": packer.column(picture.ravel()),
    }
