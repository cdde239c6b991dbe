"""The load over time of what is drawn, thinned so that no high or low of it is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mempool.show.timeline import Timeline

#: Parts of the time axis; of each the first, highest, lowest and last load is kept.
_PARTS = 600


def load_of(timeline: Timeline) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[int, int]]:
    """Times, the bytes alive from each until the next, and the peak's first time and bytes.

    The last time has load 0.
    """
    if len(timeline.owner) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), (0, 0)
    size = timeline.size[timeline.owner]
    when = np.concatenate([timeline.start, timeline.end])
    order = np.argsort(when, kind="stable")  # two sorted runs almost: quick
    when = when[order]
    loads = np.cumsum(np.concatenate([size, -size])[order])
    last = np.append(when[1:] != when[:-1], True)  # of those at one time the last counts
    times, loads = when[last], loads[last]
    at = int(loads.argmax())
    keep = telling(times, loads)
    return times[keep], loads[keep], (int(times[at]), int(loads[at]))


def telling(times: NDArray[np.int64], loads: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of the times that a picture of a load needs."""
    if len(times) <= 4 * _PARTS:
        return np.arange(len(times))
    edges = np.searchsorted(times, np.linspace(float(times[0]), float(times[-1]), _PARTS + 1)[1:-1])
    edges = np.unique(np.concatenate([[0], edges, [len(times)]]))
    keep = [edges[:-1], edges[1:] - 1]
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        keep.append(np.array([begin + loads[begin:end].argmax(), begin + loads[begin:end].argmin()]))
    return np.unique(np.concatenate(keep))
