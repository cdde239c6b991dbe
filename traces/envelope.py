"""Iterations that do the same with buffers of other sizes, as those of batches of many lengths: one for all.

The envelope has each buffer as large as it ever is. A plan of it has a place for every iteration whose
buffers are no larger, those that never came among them.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

#: What so few kinds of iterations are mostly of has a plan for each of them; so large a share is mostly.
FEW_KINDS, MOSTLY = 4, 3 / 4
#: Where more of them than this share, and than three, are larger than all before, iterations grow. Of five in
#: random order one in eleven does, of more ever fewer.
MOST_RECORDS = 0.6
#: The peak load of the envelope may be so many times the largest that came, of so many of the latest: else
#: they have little in common.
MOST_LARGER, LOADS_LOOKED_AT = 1.1, 64
#: A buffer whose size varies is expected to be no smaller than one part in so many of the smallest that came.
SMALLER = 8
#: Each has columns as long as the trace; of more, those that came last are taken.
MOST_ENVELOPES = 16


@dataclass(frozen=True, eq=False)
class Envelope:
    """Of some windows of a trace.

    Attributes:
        alike: the windows, which allocate in the same order; latest last.
        size: int64[m], of all rows of the trace, bytes: in these windows as large as in any of them.
        least: int64[m], bytes: what is expected there at least; the same where the size never varies.
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
    """Those of iterations of more kinds than are worth a plan each.

    Args:
        sequence: of each row, as the next three of `traces.windows.Windows`.
        size: of each row, in bytes.
        freed_before: of each row.
        bounds: of each window.
        main: the sequence that iterations are told by.
        known: how many allocations the iterations of known envelopes have: these are of one, however few.
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
    """Whether most of these windows are larger than all before: then so is the next, and outgrows it."""
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
            continue  # a sequence that varies is not planned
        at = np.stack(own)
        smallest, largest = size[at].min(axis=0), size[at].max(axis=0)
        most[at] = largest
        least[at] = expected_least(smallest, largest)
    return Envelope(tuple(windows), most, least)


def expected_least(smallest: NDArray[np.int64], largest: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of buffers that came in these sizes; those whose size never varies are told by it."""
    least: NDArray[np.int64] = np.where(smallest < largest, np.maximum(smallest // SMALLER, 1), largest)
    return least


def _is_tight(
    envelope: Envelope, size: NDArray[np.int64], freed_before: NDArray[np.int64], bounds: NDArray[np.int64]
) -> bool:
    """Whether its load is hardly larger than that of the largest that came."""
    peaks = [
        (_peak(envelope.size, freed_before, rows), _peak(size, freed_before, rows))
        for window in envelope.alike[-LOADS_LOOKED_AT:]
        for rows in [slice(*bounds[window].tolist())]
    ]
    largest, came = (max(column) for column in zip(*peaks, strict=True))
    return bool(largest <= MOST_LARGER * came)


def _peak(size: NDArray[np.int64], freed_before: NDArray[np.int64], rows: slice) -> int:
    """Most bytes of a window's own buffers that are alive at one time in it."""
    freed, own = freed_before[rows], size[rows]
    gone = np.flatnonzero((freed >= 0) & (freed < rows.stop))
    change = own.copy()
    np.subtract.at(change, freed[gone] - rows.start, own[gone])
    return int(np.cumsum(change).max())
