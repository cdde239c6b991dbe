"""Private pools of PyTorch, owned by captured graphs and ``MemPool``, separated as streams are."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from traces.trace import EventType

if TYPE_CHECKING:
    from traces.trace import Trace


def pools_as_streams(trace: Trace) -> Trace:
    """Return the trace with a separate stream for each pair of pool and stream, numbered from 0.

    Memory of a private pool serves no other request, even while no buffer lives in the pool: a graph writes
    to the same addresses at each replay. Allocators that separate streams therefore separate pools,
    too.
    """
    if not trace.pool.any():
        return trace
    freed = trace.kind == EventType.FREE
    pool = np.where(freed, trace.pool[trace.births], trace.pool)
    pairs = np.stack([pool, trace.stream], axis=1)
    _, stream = np.unique(pairs, axis=0, return_inverse=True)
    return dataclasses.replace(trace, stream=stream.reshape(-1))
