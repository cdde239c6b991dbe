"""Private pools of PyTorch, which captured graphs and ``MemPool`` have, kept apart as streams are."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from traces.trace import Kind

if TYPE_CHECKING:
    from traces.trace import Trace


def pools_as_streams(trace: Trace) -> Trace:
    """Return the trace with a stream of its own for each pair of pool and stream, numbered from 0.

    Memory of a private pool serves nobody else, even while nothing lives in it: a graph writes there each
    time it is replayed. Allocators that keep streams apart so keep pools apart, too.
    """
    if not trace.pool.any():
        return trace
    freed = trace.kind == Kind.FREE
    pool = np.where(freed, trace.pool[trace.births], trace.pool)
    pairs = np.stack([pool, trace.stream], axis=1)
    _, stream = np.unique(pairs, axis=0, return_inverse=True)
    return dataclasses.replace(trace, stream=stream.reshape(-1))
