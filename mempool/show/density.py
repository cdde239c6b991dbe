"""Coarse picture of the pieces that are too many and too small to be drawn one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mempool.show.timeline import Timeline
    from mempool.show.view import View

#: Size of the picture: rows of addresses and columns of time.
_SHAPE = (256, 1024)


def rest_of(timeline: Timeline, view: View, keep: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return how full each cell is of pieces outside ``keep``, uint8[rows, columns] from 0 to 255.

    The first row has the lowest addresses. A piece counts in the row of the piece's middle, from the first to
    the last column: the piece is small, or else ``keep`` would contain the piece.
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
    # Change of coverage at both ends; the column of an end is covered in part.
    full = np.zeros((rows, columns + 2))
    for edge, sign in ((begin, 1.0), (end, -1.0)):
        column = np.clip(edge.astype(np.int64), 0, columns - 1)
        part = column + 1 - edge
        np.add.at(full, (row, column), sign * part * size / height)
        np.add.at(full, (row, column + 1), sign * (1 - part) * size / height)
    covered = np.clip(np.cumsum(full, axis=1)[:, :columns], 0, 1)
    return np.ceil(covered * 255).astype(np.uint8)
