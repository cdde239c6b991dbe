"""Roofline lower bound of an operation's time: the longer of arithmetic and memory time.

The roofline model (Williams, Waterman, Patterson: "Roofline", CACM 52(4), 2009).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:
    from mempool.hardware.gpu_throughput import Rates

_HALF = (torch.float16, torch.bfloat16)
#: Parts of the names of operations that use TF32 by default.
_ROUNDING = ("conv", "rnn", "lstm", "gru")


@dataclass(frozen=True)
class Roofline:
    """A clock of `mempool.recording.torch.AccessRecorder` that models operations on a device."""

    rates: Rates

    def nanoseconds(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """Return the lower bound of an operation's time in nanoseconds; 0 for a view."""
        written = _written(func, args)
        read_bytes = {id(item): item.nbytes() for item in _storages((args, kwargs))}
        new_bytes = {id(item): item.nbytes() for item in _storages(result) if id(item) not in read_bytes}
        if not new_bytes and not written:
            return 0
        # An in-place operation reads a storage before the write.
        moved = (
            sum(read_bytes.values())
            + sum(new_bytes.values())
            + sum(read_bytes.get(item, 0) for item in written)
        )
        seconds: float = max(self._products(func, args, kwargs, result), moved / self.rates.bandwidth)
        return round(1e9 * seconds)

    def _products(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        """Return the seconds of the floating-point operations that PyTorch counts (matrix products etc.)."""
        counts = flop_registry.get(func.overloadpacket)
        if counts is None:
            return 0.0
        floats = [item.dtype for item in tree_iter((args, kwargs)) if isinstance(item, torch.Tensor)]
        rate = self.rates.single
        if any(dtype in _HALF for dtype in floats):
            rate = self.rates.half
        elif any(part in func.__name__ for part in _ROUNDING):
            rate = self.rates.convolutions
        return float(counts(*args, **kwargs, out_val=result)) / rate


def _storages(values: Any) -> list[Any]:
    return [item.untyped_storage() for item in tree_iter(values) if isinstance(item, torch.Tensor)]


def _written(func: Any, args: Any) -> set[int]:
    """Return the storages among the arguments that an operation writes."""
    pairs = zip(args, func._schema.arguments, strict=False)
    return {
        id(storage)
        for read_bytes, argument in pairs
        if argument.alias_info is not None and argument.alias_info.is_write
        for storage in _storages(read_bytes)
    }
