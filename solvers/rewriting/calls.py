"""Copies that the program makes itself, and what it takes to ask for others, however well they overlap."""

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
    """Seconds of the program for each copy, out or back.

    Attributes:
        seconds: to ask for one.
        own_bytes: copies of at most so many bytes the program makes itself.
        own_seconds: of each of these, whatever its size.
        own_per_byte: seconds a byte of these.
    """

    seconds: float = 0.0
    own_bytes: int = 0
    own_seconds: float = 0.0
    own_per_byte: float = 0.0

    def of(self, size: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of copies of so many bytes each."""
        own = self.own_seconds + self.own_per_byte * size.astype(np.float64)
        result: NDArray[np.float64] = np.where(size <= self.own_bytes, own, self.seconds)
        return result

    def within(self, graph: Graph) -> Graph:
        """A rewritten graph whose copies take that."""
        ops = np.flatnonzero(np.isin(graph.role, (Role.SWAP_OUT, Role.SWAP_IN)))
        if self == Calls() or not len(ops):
            return graph
        seconds = graph.seconds.copy()
        seconds[ops] = self.of(graph.size[graph.base[graph.reads[graph.reads_start[ops]]]])
        return graph.with_columns(seconds=seconds)

    def beside(self, link: Link) -> Link:
        """A link that has nothing of the copies that the program makes itself."""
        return OwnLink(**{f.name: getattr(link, f.name) for f in fields(Link)}, own_bytes=self.own_bytes)


@dataclass(frozen=True)
class OwnLink(Link):
    """A link that copies of at most ``own_bytes`` take nothing of."""

    own_bytes: int = 0

    def out(self, size: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Link`."""
        return np.where(size <= self.own_bytes, 0.0, super().out(size))

    def back(self, size: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Link`."""
        return np.where(size <= self.own_bytes, 0.0, super().back(size))
