"""Lower bounds on the arena size: the load over time and the bounds derived from the load."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from solvers import _core
from solvers.packing.pieces import Pieces, at, pieces_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.buffers import Buffers

#: Number of instants of highest load at which the padding of the topmost buffer is considered.
_INSTANTS = 256


def load_curve(buffers: Buffers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the bytes alive over time without persistent buffers: (times, loads), int64[m] each.

    ``loads[k]`` holds from ``times[k]`` until the next time; the load is 0 before the first time and, on a
    line, after the last. On a circle the curve covers one period from 0, and all live instances count.
    Alignment padding is not counted.
    """
    return _curve(pieces_of(buffers))


def peak_load(buffers: Buffers) -> int:
    """Return the peak load in bytes without persistent buffers; on a circle all live instances count."""
    return pieces_of(buffers).load.peak


def lower_bound(buffers: Buffers) -> int:
    """Return a lower bound on the arena in bytes; at least the peak load.

    The bound is the sum of the groups' peak loads, since groups share no addresses. If all buffers have an
    alignment above 1, all buffers but the topmost count with their padding. The end of a buffer with a fixed
    offset is another lower bound.
    """
    return bound_of(buffers, pieces_of(buffers))


def bound_of(buffers: Buffers, pieces: Pieces) -> int:
    """Return the `lower_bound` of buffers whose pieces are already computed."""
    taking = pieces.rows
    if len(taking) == 0:
        return 0
    offset, size = at(buffers.offset, taking), at(buffers.size, taking)
    fixed = np.flatnonzero(offset >= 0)
    top = int((offset[fixed] + size[fixed]).max(initial=0))
    alignment = int(at(buffers.alignment, taking).min())
    groups = _by_group(pieces, buffers.group)
    plain = sum(part.load.peak for part in groups)
    if alignment == 1:
        return max(top, plain)
    padded = -(-buffers.size // alignment) * alignment
    padding = padded - buffers.size
    if not padding[taking].any():
        return max(top, plain)
    if len(groups) == 1:
        aligned = _padded_bound(dataclasses.replace(pieces, size=padded), padding)
    else:
        peaks = [dataclasses.replace(part, size=padded).load.peak for part in groups]
        aligned = sum(peaks) - int(padding[taking].max())
    return max(top, plain, aligned)


def _by_group(pieces: Pieces, group: NDArray[np.int64]) -> list[Pieces]:
    if (group == group[:1]).all():
        return [pieces]
    of = group[pieces.owner]
    order = np.argsort(of, kind="stable")
    ends = np.flatnonzero(np.diff(of[order])) + 1
    return [
        dataclasses.replace(pieces, owner=pieces.owner[k], start=pieces.start[k], end=pieces.end[k])
        for k in np.split(order, ends)
    ]


def _curve(pieces: Pieces) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    columns = pieces.owner, pieces.start, pieces.end, pieces.size
    return _core.load_curve(*columns, pieces.period or 0)


def _padded_bound(pieces: Pieces, padding: NDArray[np.int64]) -> int:
    """Return the maximum over time of the padded load minus the largest padding of a live buffer, in bytes.

    The buffers alive at one time lie above one another, and all but the topmost need their padding. Only the
    `_INSTANTS` times of highest load are considered; skipping the others gives a weaker bound, not a wrong
    one.
    """
    times, loads = _curve(pieces)
    period = pieces.period
    best = 0
    for k in np.argsort(-loads, kind="stable")[:_INSTANTS]:
        if loads[k] <= best:
            break
        since = times[k] - pieces.start if period is None else (times[k] - pieces.start) % period
        alive = (since >= 0) & (since < pieces.end - pieces.start)
        best = max(best, int(loads[k]) - int(padding[pieces.owner[alive]].max(initial=0)))
    return best
