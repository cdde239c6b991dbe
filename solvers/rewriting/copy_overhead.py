"""Program time per copy: the time of synchronous copies, and the time to request asynchronous copies."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting.graph import Role
from solvers.swap.link import Link

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph


@dataclass(frozen=True)
class CopyOverhead:
    """Seconds that each copy, out or back, costs the program itself, without overlap.

    Attributes:
        request_seconds: time to request a copy.
        inline_bytes: largest size of a synchronous copy.
        inline_seconds: fixed time of a synchronous copy.
        inline_per_byte: seconds per byte of a synchronous copy.
    """

    request_seconds: float = 0.0
    inline_bytes: int = 0
    inline_seconds: float = 0.0
    inline_per_byte: float = 0.0

    def seconds_of(self, size: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of copies of ``size`` bytes each."""
        inline = self.inline_seconds + self.inline_per_byte * size.astype(np.float64)
        result: NDArray[np.float64] = np.where(size <= self.inline_bytes, inline, self.request_seconds)
        return result

    def applied_to(self, graph: Graph) -> Graph:
        """Set the seconds of the copies in a rewritten graph to these times."""
        ops = np.flatnonzero(np.isin(graph.role, (Role.OFFLOAD, Role.RELOAD)))
        if self == CopyOverhead() or not len(ops):
            return graph
        seconds = graph.seconds.copy()
        seconds[ops] = self.seconds_of(graph.size[graph.base[graph.reads[graph.reads_start[ops]]]])
        return graph.with_columns(seconds=seconds)

    def overlapped(self, link: Link) -> Link:
        """Return the link without the time of synchronous copies, which the graph contains."""
        return OverlappedLink(
            **{f.name: getattr(link, f.name) for f in fields(Link)}, inline_bytes=self.inline_bytes
        )


@dataclass(frozen=True)
class OverlappedLink(Link):
    """Link on which copies of at most ``inline_bytes`` take no time."""

    inline_bytes: int = 0

    def out(self, size: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of copies to the host, see `Link`."""
        return np.where(size <= self.inline_bytes, 0.0, super().out(size))

    def back(self, size: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of copies to the device, see `Link`."""
        return np.where(size <= self.inline_bytes, 0.0, super().back(size))
