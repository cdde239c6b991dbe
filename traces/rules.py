"""Validity rules of buffer tables, for tables from any source."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from traces.columns import LARGEST, first_fault, power_of_two
from traces.errors import TraceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.buffers import Buffers


def check_buffers(buffers: Buffers) -> None:
    """Raise for the first buffer that could not be placed, whatever the other buffers are.

    Raises:
        TraceError: naming the row.
    """
    if buffers.period is not None and not 1 <= buffers.period <= LARGEST:
        raise TraceError(f"period {buffers.period} is not between 1 and 2**62")
    if fault := first_fault(_faults(buffers)):
        raise TraceError(fault[1], row=fault[0])
    if len(buffers.gap_buffer):
        _check_gaps(buffers)
    if buffers.ids is None:
        return
    if len(buffers.ids) != len(buffers):
        raise TraceError(f"{len(buffers.ids)} ids for {len(buffers)} buffers")
    if len(set(buffers.ids)) != len(buffers):
        first: dict[str, int] = {}
        row = next(row for row, name in enumerate(buffers.ids) if first.setdefault(name, row) != row)
        raise TraceError(f"duplicate id {buffers.ids[row][:40]!r}", row=row)


def _faults(buffers: Buffers) -> list[tuple[NDArray[np.bool_], str]]:
    faults = [
        (buffers.end < buffers.start, "end before start"),
        ((buffers.start <= -LARGEST) | (buffers.end > LARGEST), "a time beyond 2**62"),
        (buffers.size < 0, "negative size"),
        (buffers.size > LARGEST, "size beyond 2**62"),
        (~power_of_two(buffers.alignment), "alignment is not a power of two"),
        (buffers.offset < -1, "negative offset"),
        (buffers.offset > LARGEST, "offset beyond 2**62"),
    ]
    if buffers.period is not None:
        outside = (buffers.start < 0) | (buffers.start >= buffers.period)
        faults.append((outside, f"start is outside the period of {buffers.period}"))
    return faults


def _check_gaps(buffers: Buffers) -> None:
    owner, start, end = buffers.gap_buffer, buffers.gap_start, buffers.gap_end
    unknown = (owner < 0) | (owner >= len(buffers))
    if unknown.any():
        raise TraceError(f"a gap of buffer {owner[unknown][0]}, of {len(buffers)} buffers")
    follows = np.zeros(len(owner), np.bool_)
    follows[1:] = (owner[1:] < owner[:-1]) | ((owner[1:] == owner[:-1]) & (start[1:] < end[:-1]))
    faults = [
        (start >= end, "a gap that ends before it starts"),
        ((start < buffers.start[owner]) | (end > buffers.end[owner]), "a gap outside the lifetime"),
        (follows, "gaps overlap or are not sorted"),
    ]
    if fault := first_fault(faults):
        raise TraceError(fault[1], row=int(owner[fault[0]]))
