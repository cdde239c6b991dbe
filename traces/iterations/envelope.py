"""Envelopes: one pattern for iterations that differ in buffer sizes only, such as batches of many lengths.

Each buffer of the envelope has its largest size among the iterations. A plan of the envelope therefore fits
every iteration with equal or smaller buffers, including iterations that never occurred before.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

#: If at most `FEW_KINDS` variants make up the share `MOSTLY` of all iterations, each variant gets a separate
#: plan.
FEW_KINDS, MOSTLY = 4, 3 / 4
#: Iterations count as growing if more than three of them, and more than this share, are larger than all
#: earlier iterations. For five iterations in random order the probability is 1 in 11, for more iterations
#: less.
MOST_RECORDS = 0.6
#: The peak load of the envelope may be at most `MOST_LARGER` times the largest peak load among the latest
#: `LOADS_LOOKED_AT` iterations; otherwise the iterations have little in common.
MOST_LARGER, LOADS_LOOKED_AT = 1.1, 64
#: The least expected size of a buffer of varying size is 1 / `SMALLER` of its smallest observed size.
SMALLER = 8
#: Most envelopes, since each has columns as long as the trace; the most recent are kept.
MOST_ENVELOPES = 16


@dataclass(frozen=True, eq=False)
class Envelope:
    """The envelope of some windows of a trace.

    Attributes:
        alike: the windows, all with the same order of allocations; latest last.
        size: int64[m], bytes, for all rows of the trace; in these windows, the largest size of the position.
        least: int64[m], bytes: the least expected size of each row; equal to a size that never varies.
    """

    alike: tuple[int, ...]
    size: NDArray[np.int64]
    least: NDArray[np.int64]


def envelopes(
    sequence: NDArray[np.int32],
    size: NDArray[np.int64],
    freed_before: NDArray[np.int64],
    bounds: NDArray[np.int64],
    main: int,
    known: Collection[int] = (),
) -> list[Envelope]:
    """Return envelopes of iterations with too many variants for one plan each.

    Args:
        sequence: sequence of each row, as the next three of `traces.iterations.windows.Windows`.
        size: size of each row in bytes.
        freed_before: position before which each row is freed.
        bounds: bounds of each window.
        main: the sequence that identifies iterations.
        known: allocation counts of the iterations of known envelopes, for which two iterations suffice.
    """
    of_count: dict[int, list[int]] = {}
    for window, (first, end) in enumerate(bounds.tolist()):
        of_count.setdefault(int((sequence[first:end] == main).sum()), []).append(window)
    found: list[Envelope] = []
    for count, windows in sorted(of_count.items(), key=lambda one: -one[1][-1]):
        if len(found) == MOST_ENVELOPES:
            break
        first, end = bounds[windows[-1]].tolist()
        one = len(windows) > 1 and end - first in known
        many = one or _are_many_kinds(sequence, size, bounds[windows], main)
        if count and many and not _grows(size, bounds[windows]):
            envelope = _envelope(sequence, size, bounds, windows)
            if _is_tight(envelope, size, freed_before, bounds):
                found.append(envelope)
    return found


def _are_many_kinds(
    sequence: NDArray[np.int32], size: NDArray[np.int64], bounds: NDArray[np.int64], main: int
) -> bool:
    kinds = collections.Counter(
        size[first:end][sequence[first:end] == main].tobytes() for first, end in bounds.tolist()
    )
    few = sum(count for _, count in kinds.most_common(FEW_KINDS))
    return len(kinds) > FEW_KINDS and few < MOSTLY * len(bounds)


def _grows(size: NDArray[np.int64], bounds: NDArray[np.int64]) -> bool:
    """Return true if most of these windows are larger than all earlier windows, as the next one may be."""
    whole = [int(size[first:end].sum()) for first, end in bounds.tolist()]
    largest = np.maximum.accumulate(whole)
    return 1 + int((np.diff(largest) > 0).sum()) > max(len(whole) * MOST_RECORDS, 3)


def _envelope(
    sequence: NDArray[np.int32], size: NDArray[np.int64], bounds: NDArray[np.int64], windows: Sequence[int]
) -> Envelope:
    most, least = size.copy(), size.copy()
    rows = [np.arange(*bounds[window]) for window in windows]
    for s in np.flatnonzero(np.bincount(sequence[rows[-1]])).tolist():
        own = [each[sequence[each] == s] for each in rows]
        if len({len(each) for each in own}) > 1:
            continue  # varying sequences are not planned
        at = np.stack(own)
        smallest, largest = size[at].min(axis=0), size[at].max(axis=0)
        most[at] = largest
        least[at] = expected_least(smallest, largest)
    return Envelope(tuple(windows), most, least)


def expected_least(smallest: NDArray[np.int64], largest: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the least expected sizes of buffers, given observed sizes; a constant size is unchanged."""
    least: NDArray[np.int64] = np.where(smallest < largest, np.maximum(smallest // SMALLER, 1), largest)
    return least


def _is_tight(
    envelope: Envelope, size: NDArray[np.int64], freed_before: NDArray[np.int64], bounds: NDArray[np.int64]
) -> bool:
    """Return true if the envelope's peak load is hardly larger than the largest observed peak load."""
    peaks = [
        (_peak(envelope.size, freed_before, rows), _peak(size, freed_before, rows))
        for window in envelope.alike[-LOADS_LOOKED_AT:]
        for rows in [slice(*bounds[window].tolist())]
    ]
    largest, came = (max(column) for column in zip(*peaks, strict=True))
    return bool(largest <= MOST_LARGER * came)


def _peak(size: NDArray[np.int64], freed_before: NDArray[np.int64], rows: slice) -> int:
    """Return the peak load, in bytes, of a window's own buffers within the window."""
    freed, own = freed_before[rows], size[rows]
    gone = np.flatnonzero((freed >= 0) & (freed < rows.stop))
    change = own.copy()
    np.subtract.at(change, freed[gone] - rows.start, own[gone])
    return int(np.cumsum(change).max())
