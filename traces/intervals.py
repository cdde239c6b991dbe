"""Half-open intervals of addresses or times: union, and search for the innermost nested interval."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


def union_of_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union as sorted ranges that neither overlap nor touch."""
    whole: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if whole and begin <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(whole[-1][1], end)
        else:
            whole.append((begin, end))
    return whole


def innermost(
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    group: NDArray[np.int64],
    time: NDArray[np.int64],
    time_group: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the row of the shortest interval around each time in its group, int64[m]; -1 if none.

    At one depth of nesting, the interval around a time is the last that began. If intervals of a group
    overlap without nesting, the result for a time may be -1.

    Args:
        start: int64[n], times at which the half-open intervals begin.
        end: int64[n], times at which they end, exclusive; none before the start.
        group: int64[n], intervals of different groups are independent of each other.
        time: int64[m].
        time_group: int64[m], as ``group``.
    """
    rows = np.flatnonzero(end > start)
    rows = rows[np.argsort(-end[rows], kind="stable")]
    n = len(rows)
    # The sort is stable: at one time, ends precede starts, the longest interval first, and starts precede
    # queries.
    moment = np.concatenate([end[rows], start[rows], time])
    owner = np.concatenate([group[rows], group[rows], time_group])
    order = np.lexsort((moment, owner)).astype(np.int32)
    depth = np.cumsum(np.where(order < n, -1, np.where(order < 2 * n, 1, 0)), dtype=np.int32)
    inside = order >= n
    order, depth = order[inside], depth[inside]
    order = order[np.argsort(depth, kind="stable")]
    # Within each depth, the index of the last start before each event.
    opened = np.maximum.accumulate(np.where(order < 2 * n, np.arange(len(order)), -1))
    asked = (order >= 2 * n) & (opened >= 0)
    which = order[asked] - 2 * n
    candidate = rows[order[opened[asked]] - n]
    found = np.full(len(time), -1, np.int64)
    holds = time[which] < end[candidate]
    found[which[holds]] = candidate[holds]
    return found
