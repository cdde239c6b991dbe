"""Measure the seconds that copies cost the calling program itself."""

from __future__ import annotations

import functools
import math
import time
from typing import TYPE_CHECKING

import torch

from mempool.torch.compiled import ops
from mempool.torch.compiled.runtime import RUNTIME, Moved
from mempool.torch.offload.link import fit_line
from solvers.rewriting.copy_overhead import CopyOverhead

if TYPE_CHECKING:
    from collections.abc import Callable

_COPIES, _ROUNDS, _BYTES = 16, 7, 4096
#: Sizes in bytes of the measured copies that the program makes itself: if it makes only the small copies, and
#: if it makes all of them.
_OWN_SMALL, _OWN_ALL = (_BYTES, 64 << 10, 256 << 10), (_BYTES, 256 << 10, 4 << 20)


@functools.cache
def calls_of(device: torch.device, host_limit: int = 0) -> CopyOverhead:
    """Measure the seconds that copies cost the program on a device; the best of `_ROUNDS` rounds."""
    own = RUNTIME.engine(device, host_limit).sync_copier
    sizes = _OWN_SMALL if own is None or own.sync_bytes < _OWN_ALL[-1] else _OWN_ALL
    counted = RUNTIME.moved
    try:
        asked = _best(device, _BYTES, host_limit, _asked)
        times = [_best(device, size, host_limit, _own) for size in sizes] if own else []
    finally:
        RUNTIME.moved = counted
    return CopyOverhead(asked, own.sync_bytes, *fit_line(sizes, times)) if own else CopyOverhead(asked)


def _best(
    device: torch.device,
    size: int,
    host_limit: int,
    copied: Callable[[list[torch.Tensor], int], None],
) -> float:
    """Return the seconds of one copy, offload or reload, without the seconds spent waiting for transfers."""
    values = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(_COPIES)]
    best = math.inf
    for _ in range(_ROUNDS):
        RUNTIME.moved = Moved()
        begin = time.perf_counter()
        copied(values, host_limit)
        spent = time.perf_counter() - begin
        best = min(best, (spent - RUNTIME.moved.waited_seconds) / (2 * _COPIES))
    return best


def _asked(values: list[torch.Tensor], host_limit: int) -> None:
    out = [ops.swap_out(value, host_limit) for value in values]
    away = [ops.swapped_out(ticket, value) for ticket, value in zip(out, values, strict=True)]
    coming = [ops.swap_in(ticket, *_place(value)) for ticket, value in zip(away, values, strict=True)]
    for ticket, value in zip(coming, values, strict=True):
        ops.swapped_in(ticket, *_place(value))


def _own(values: list[torch.Tensor], host_limit: int) -> None:
    away = [ops.sent(value, host_limit) for value in values]
    for ticket, value in zip(away, values, strict=True):
        ops.fetched(ticket, *_place(value))


def _place(value: torch.Tensor) -> tuple[object, ...]:
    return value.shape, value.stride(), value.dtype, value.device
