"""Thinned pictures of large timelines: the load over time, and the density of pieces too small to draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mempool.show.timeline import Timeline
    from mempool.show.view import View


#: Number of parts of the time axis; each part keeps its first, highest, lowest and last load.
_PARTS = 600


def load_of(timeline: Timeline) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[int, int]]:
    """Return times, the bytes alive from each time to the next, and the peak's first time and bytes.

    The last time has load 0.
    """
    if len(timeline.owner) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), (0, 0)
    size = timeline.size[timeline.owner]
    when = np.concatenate([timeline.start, timeline.end])
    order = np.argsort(when, kind="stable")  # fast, since the array is almost two sorted runs
    when = when[order]
    loads = np.cumsum(np.concatenate([size, -size])[order])
    last = np.append(when[1:] != when[:-1], True)  # the last change at one time
    times, loads = when[last], loads[last]
    at = int(loads.argmax())
    keep = kept_extremes(times, loads)
    return times[keep], loads[keep], (int(times[at]), int(loads[at]))


def kept_extremes(times: NDArray[np.int64], loads: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of the times that a plot of the load needs."""
    if len(times) <= 4 * _PARTS:
        return np.arange(len(times))
    edges = np.searchsorted(times, np.linspace(float(times[0]), float(times[-1]), _PARTS + 1)[1:-1])
    edges = np.unique(np.concatenate([[0], edges, [len(times)]]))
    keep = [edges[:-1], edges[1:] - 1]
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        keep.append(np.array([begin + loads[begin:end].argmax(), begin + loads[begin:end].argmin()]))
    return np.unique(np.concatenate(keep))


#: Size of the picture: rows of addresses and columns of time.
_SHAPE = (256, 1024)


def density_of_small_pieces(timeline: Timeline, view: View, keep: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the density of the pieces outside ``keep`` in each cell, uint8[rows, columns].

    The first row has the lowest addresses. A piece counts in the row of its middle, from its first to its
    last column; pieces outside ``keep`` are small.
    """
    rows, columns = _SHAPE
    left = np.ones(len(timeline.owner), np.bool_)
    left[keep] = False
    left &= view.address >= 0
    size = timeline.size[timeline.owner[left]].astype(np.float64)
    first, last = float(timeline.start.min()), float(timeline.end.max())
    step = max(last - first, 1) / columns
    begin, end = (timeline.start[left] - first) / step, (timeline.end[left] - first) / step
    height = max(view.top, 1) / rows
    row = np.clip(((view.address[left] + size / 2) / height).astype(np.int64), 0, rows - 1)
    # Change of coverage at both ends, which cover their column in part.
    full = np.zeros((rows, columns + 2))
    for edge, sign in ((begin, 1.0), (end, -1.0)):
        column = np.clip(edge.astype(np.int64), 0, columns - 1)
        part = column + 1 - edge
        np.add.at(full, (row, column), sign * part * size / height)
        np.add.at(full, (row, column + 1), sign * (1 - part) * size / height)
    covered = np.clip(np.cumsum(full, axis=1)[:, :columns], 0, 1)
    return np.ceil(covered * 255).astype(np.uint8)
