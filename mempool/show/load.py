"""Load over time of the drawn pieces, thinned without losing any maximum or minimum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mempool.show.timeline import Timeline

#: Number of parts of the time axis; the first, highest, lowest and last load of each part is kept.
_PARTS = 600


def load_of(timeline: Timeline) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[int, int]]:
    """Return times, the bytes alive from each time until the next, and the peak's first time and bytes.

    The last time has load 0.
    """
    if len(timeline.owner) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), (0, 0)
    size = timeline.size[timeline.owner]
    when = np.concatenate([timeline.start, timeline.end])
    order = np.argsort(when, kind="stable")  # fast, since the array is almost two sorted runs
    when = when[order]
    loads = np.cumsum(np.concatenate([size, -size])[order])
    last = np.append(when[1:] != when[:-1], True)  # the last of several changes at one time counts
    times, loads = when[last], loads[last]
    at = int(loads.argmax())
    keep = telling(times, loads)
    return times[keep], loads[keep], (int(times[at]), int(loads[at]))


def telling(times: NDArray[np.int64], loads: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of the times that a picture of a load needs."""
    if len(times) <= 4 * _PARTS:
        return np.arange(len(times))
    edges = np.searchsorted(times, np.linspace(float(times[0]), float(times[-1]), _PARTS + 1)[1:-1])
    edges = np.unique(np.concatenate([[0], edges, [len(times)]]))
    keep = [edges[:-1], edges[1:] - 1]
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        keep.append(np.array([begin + loads[begin:end].argmax(), begin + loads[begin:end].argmin()]))
    return np.unique(np.concatenate(keep))
