"""What the program itself takes to ask for a copy, however well the copy overlaps."""

from __future__ import annotations

import functools
import math
import time

import torch

from mempool.torch.rewriting import ops
from mempool.torch.rewriting.runtime import RUNTIME, Moved

_COPIES, _ROUNDS, _BYTES = 32, 5, 4096


@functools.cache
def call_seconds(device: torch.device, host_limit: int = 0) -> float:
    """Seconds of one copy, out or back: of small ones, asked for together, the best of some rounds."""
    value = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    place = value.shape, value.stride(), value.dtype, value.device

    def once() -> float:
        begin = time.perf_counter()
        out = [ops.swap_out(value, host_limit) for _ in range(_COPIES)]
        away = [ops.swapped_out(ticket, value) for ticket in out]
        coming = [ops.swap_in(ticket, *place) for ticket in away]
        for ticket in coming:
            ops.swapped_in(ticket, *place)
        spent = time.perf_counter() - begin
        return (spent - RUNTIME.moved.waited_seconds) / (2 * _COPIES)

    counted, best = RUNTIME.moved, math.inf
    try:
        for _ in range(_ROUNDS):
            RUNTIME.moved = Moved()
            best = min(best, once())
    finally:
        RUNTIME.moved = counted
    return best
