"""The segments that the recorded allocator held, from the events that took and gave them back."""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import TYPE_CHECKING

import numpy as np

from mempool.show.view import Segments
from traces.trace import Kind

if TYPE_CHECKING:
    from traces.trace import Trace


def recorded_segments(trace: Trace) -> Segments:
    """Ranges of addresses, with the events between which they were held.

    What is never given back is held to the trace's end. What is given back in part is held on in its other
    parts. What was never taken is passed over.
    """
    rows = np.flatnonzero((trace.kind == Kind.RESERVE) | (trace.kind == Kind.RELEASE))
    held: list[tuple[int, int, int]] = []  # address, end, event; sorted, without overlaps
    done: list[tuple[int, int, int, int]] = []
    for row in rows.tolist():
        low, size = int(trace.address[row]), int(trace.size[row])
        if low < 0 or size == 0:
            continue
        _close(held, done, low, low + size, row)
        if trace.kind[row] == Kind.RESERVE:
            insort(held, (low, low + size, row))
    done += [(low, high, start, len(trace)) for low, high, start in held]
    table = np.array([(low, high - low, start, end) for low, high, start, end in done], np.int64)
    return Segments(*table.reshape(-1, 4).T)


def _close(
    held: list[tuple[int, int, int]], done: list[tuple[int, int, int, int]], low: int, high: int, now: int
) -> None:
    """End what is held of a range now."""
    first = max(bisect_right(held, (low,)) - 1, 0)
    while first < len(held) and held[first][1] <= low:
        first += 1
    last = first
    while last < len(held) and held[last][0] < high:
        last += 1
    rest = []
    for begin, end, start in held[first:last]:
        done.append((max(begin, low), min(end, high), start, now))
        rest += [(begin, low, start)] * (begin < low) + [(high, end, start)] * (end > high)
    held[first:last] = rest
