"""How small an arena can be at best: the load over time and the bounds that follow from it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from solvers import _core
from solvers.pieces import Pieces, at, pieces_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.buffers import Buffers

#: Instants near the peak at which the padding of the topmost buffer is looked at.
_INSTANTS = 256


def load_curve(buffers: Buffers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bytes alive over time, without persistent buffers: (times, loads), int64[m] each.

    ``loads[k]`` holds from ``times[k]`` until the next; before the first time, and on a line after the last,
    it is 0. On a circle the curve covers one period from 0, and every instance alive counts. Alignment is not
    counted.
    """
    return _curve(pieces_of(buffers))


def peak_load(buffers: Buffers) -> int:
    """Most bytes alive at one time, persistent buffers excepted; on a circle every instance alive counts."""
    return pieces_of(buffers).load.peak


def lower_bound(buffers: Buffers) -> int:
    """A size below which no arena can be, in bytes; at least the peak load.

    The sum of the peak loads of groups, which share no addresses. Where all buffers are aligned, all but the
    topmost are counted with their padding. A fixed offset bounds too.
    """
    return bound_of(buffers, pieces_of(buffers))


def bound_of(buffers: Buffers, pieces: Pieces) -> int:
    """`lower_bound` of buffers whose pieces are at hand."""
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
    """The largest, over times, of the padded load less the padding of the buffer alive then that has most.

    The buffers alive at one time lie above one another, each but the topmost with its padding. Only the times
    of highest load are looked at; leaving some out gives a weaker bound, not a wrong one.
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
