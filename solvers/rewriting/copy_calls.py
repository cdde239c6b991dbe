"""Program time per copy: copies that the program makes itself, and the time to request the others."""

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
class Calls:
    """Seconds of the program for each copy, out or back, which no overlap can hide.

    Attributes:
        seconds: time to request a copy.
        own_bytes: size up to which the program makes copies itself.
        own_seconds: fixed time of each such copy.
        own_per_byte: seconds a byte of such a copy.
    """

    seconds: float = 0.0
    own_bytes: int = 0
    own_seconds: float = 0.0
    own_per_byte: float = 0.0

    def of(self, size: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of copies of ``size`` bytes each."""
        own = self.own_seconds + self.own_per_byte * size.astype(np.float64)
        result: NDArray[np.float64] = np.where(size <= self.own_bytes, own, self.seconds)
        return result

    def within(self, graph: Graph) -> Graph:
        """Set the seconds of the copies in a rewritten graph to these times."""
        ops = np.flatnonzero(np.isin(graph.role, (Role.SWAP_OUT, Role.SWAP_IN)))
        if self == Calls() or not len(ops):
            return graph
        seconds = graph.seconds.copy()
        seconds[ops] = self.of(graph.size[graph.base[graph.reads[graph.reads_start[ops]]]])
        return graph.with_columns(seconds=seconds)

    def beside(self, link: Link) -> Link:
        """Return a link on which copies that the program makes itself take no time."""
        return OwnLink(**{f.name: getattr(link, f.name) for f in fields(Link)}, own_bytes=self.own_bytes)


@dataclass(frozen=True)
class OwnLink(Link):
    """Link on which copies of at most ``own_bytes`` take no time."""

    own_bytes: int = 0

    def out(self, size: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of copies to the host, see `Link`."""
        return np.where(size <= self.own_bytes, 0.0, super().out(size))

    def back(self, size: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of copies to the device, see `Link`."""
        return np.where(size <= self.own_bytes, 0.0, super().back(size))
