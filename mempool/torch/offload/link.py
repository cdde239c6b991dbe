"""Measurement of the copy speed between device and host."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mempool.torch.offload.options import OPTIONS
from solvers.swap.link import Link

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Sizes of the timed copies, bytes.
SIZES = tuple(1 << bits for bits in range(14, 25, 2))


class TimedCopies(Protocol):
    """Timed copies between the device and the host."""

    def timed(self, size: int, *, out: bool, back: bool) -> float:
        """Return the seconds of concurrent copies of `size` bytes in the requested directions."""


def measure(copies: TimedCopies, sizes: Sequence[int] = SIZES) -> Link:
    """Fit a link to medians of copies of these sizes, in bytes: each direction alone, and both at once."""
    ways = ((True, False), (False, True), (True, True))
    for out, back in ways:  # warm up pages and contexts
        copies.timed(sizes[-1], out=out, back=back)
    times = {
        way: [
            statistics.median(copies.timed(size, out=way[0], back=way[1]) for _ in range(OPTIONS.link_rounds))
            for size in sizes
        ]
        for way in ways
    }
    out_seconds, in_seconds, both = (times[way] for way in ways)
    # With an engine per direction, both copies together take as long as the slower one; with one engine, the
    # sum.
    alone = max(out_seconds[-1], in_seconds[-1]), out_seconds[-1] + in_seconds[-1]
    return Link(*fit_line(sizes, out_seconds), *fit_line(sizes, in_seconds), duplex=both[-1] < sum(alone) / 2)


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit non-negative a and b of ``a + b * size`` to times by least relative squares.

    Args:
        sizes: bytes, at least two different values.
        seconds: time for each size.
    """
    size, time = np.asarray(sizes, np.float64), np.maximum(np.asarray(seconds, np.float64), 1e-9)
    columns = np.stack([1 / time, size / time], axis=1)
    scale = np.sqrt((columns**2).sum(axis=0))
    both = np.linalg.lstsq(columns / scale, np.ones(len(size)), rcond=None)[0] / scale
    each = columns.sum(axis=0) / scale**2  # best fits with a alone, and with b alone
    lines = np.stack([both, each * (1, 0), each * (0, 1)])
    lines = lines[(lines >= 0).all(axis=1)]
    off = ((lines @ columns.T - 1) ** 2).sum(axis=1)
    fixed, per_byte = lines[off.argmin()].tolist()
    return fixed, per_byte
