"""How long copies take here, measured."""

from __future__ import annotations

import importlib.util
import statistics
from typing import TYPE_CHECKING, Protocol

import numpy as np

from solvers.swap.link import Link

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.torch.swapping.engine import Engine

#: Bytes of the copies that are timed.
SIZES = tuple(1 << bits for bits in range(14, 25, 2))
_ROUNDS = 7


class Copies(Protocol):
    """What copies between the device and the host, for a stopwatch."""

    def timed(self, size: int, *, out: bool, back: bool) -> float:
        """Seconds of a copy of so many bytes each way that is named, until all have ended."""


def measure(copies: Copies, sizes: Sequence[int] = SIZES) -> Link:
    """The link that fits medians of copies of these sizes, in bytes: each way alone, and both at once."""
    ways = ((True, False), (False, True), (True, True))
    for out, back in ways:  # what is slow once: pages, contexts
        copies.timed(sizes[-1], out=out, back=back)
    times = {
        way: [
            statistics.median(copies.timed(size, out=way[0], back=way[1]) for _ in range(_ROUNDS))
            for size in sizes
        ]
        for way in ways
    }
    out_seconds, in_seconds, both = (times[way] for way in ways)
    # Engines of their own take as long as the slower copy; one engine, as long as both.
    alone = max(out_seconds[-1], in_seconds[-1]), out_seconds[-1] + in_seconds[-1]
    return Link(*fitted(sizes, out_seconds), *fitted(sizes, in_seconds), duplex=both[-1] < sum(alone) / 2)


def fitted(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """The a and b, not negative, with which ``a + b * size`` is nearest to times: least relative squares.

    Args:
        sizes: bytes, two or more that differ.
        seconds: of each.
    """
    size, time = np.asarray(sizes, np.float64), np.maximum(np.asarray(seconds, np.float64), 1e-9)
    columns = np.stack([1 / time, size / time])
    (aa, ab), (_, bb) = columns @ columns.T
    a1, b1 = columns.sum(axis=1)
    turn = aa * bb - ab * ab
    fixed, per_byte = (a1 * bb - b1 * ab) / turn, (b1 * aa - a1 * ab) / turn
    if fixed < 0:
        return 0.0, float(b1 / bb)
    return (float(fixed), float(per_byte)) if per_byte >= 0 else (float(a1 / aa), 0.0)


def of_this_machine() -> tuple[Link, str]:
    """The link to this machine's GPU, or where there is none from memory to memory, and which it is.

    PyTorch is imported where there is a GPU, and nowhere else.
    """
    from mempool import _core

    if _core.cuda_devices() and importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            from mempool.torch.swapping.cuda_engine import CudaEngine

            return _of(CudaEngine(torch.device("cuda", 0), 1 << 28)), torch.cuda.get_device_name(0)
    from mempool.torch.swapping.host_engine import HostEngine

    return _of(HostEngine(1)), "from memory to memory: no GPU is seen"


def _of(engine: Engine) -> Link:
    try:
        return engine.link()
    finally:
        engine.close()
