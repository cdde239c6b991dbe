"""Refused requests, which got no memory in the recorded program, as buffers for a simulated allocator."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.trace import COLUMNS, UNKNOWN, EventType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.trace import Trace


def with_attempts(trace: Trace) -> tuple[Trace, NDArray[np.int64]]:
    """Return a trace in which each refused request is a buffer, allocated and freed at once.

    An allocator that serves the whole result would have served the requests that failed; later requests of
    the program are unknown.

    Returns:
        The trace, and for each of its rows the row of the given trace, int64[m].
    """
    refused = trace.kind == EventType.REFUSED
    if not refused.any():
        return trace, np.arange(len(trace))
    rows = np.repeat(np.arange(len(trace)), 1 + refused)
    table: dict[str, Any] = {name: np.array(getattr(trace, name)[rows]) for name in COLUMNS}
    alloc = np.flatnonzero(table["kind"] == EventType.REFUSED)[::2]
    first = int(trace.buffer.max(initial=-1)) + 1
    table["kind"][alloc], table["kind"][alloc + 1] = EventType.ALLOC, EventType.FREE
    for at in (alloc, alloc + 1):
        table["buffer"][at] = first + np.arange(len(alloc))
    for name in ("size", "category"):
        table[name][alloc + 1] = UNKNOWN[name]
    return dataclasses.replace(trace, **table), rows
