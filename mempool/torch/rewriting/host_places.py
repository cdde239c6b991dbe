"""Where copies lie in the host's arena: packed by lifetime before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mempool.torch.swapping.holes import PAGE, pages
from mempool.torch.swapping.host_copies import packed
from traces.buffers import Buffers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from solvers.rewriting import Graph, Rewriting


@dataclass(frozen=True)
class HostPlaces:
    """Offsets of copies.

    Attributes:
        at: by value, in bytes; none of a value that does not leave.
        size: bytes from the first to the last of them, whole pages.
    """

    at: Mapping[int, int] = field(default_factory=dict)
    size: int = 0

    def behind(self, begin: int) -> HostPlaces:
        """The same places so many bytes later."""
        return HostPlaces({value: begin + at for value, at in self.at.items()}, self.size)


def places_of(graph: Graph, rewriting: Rewriting) -> HostPlaces:
    """Where each value that leaves is copied to.

    A copy is there from the operation that makes the value to the last one that reads what comes back; where
    that runs a second time, to the end.

    Args:
        graph: the step before it is rewritten.
        rewriting: decisions about it.
    """
    swaps = rewriting.swaps
    if not swaps:
        return HostPlaces()
    count = len(graph)
    values = [swap.value for swap in swaps]
    ends = [max((run for one in swap.ins for run in one.consumers), default=count) for swap in swaps]
    sizes = [pages(int(size)) for size in graph.size[values]]
    buffers = Buffers.of(graph.producer[values], np.minimum(ends, count) + 1, sizes, alignment=PAGE)
    at, size = packed(buffers)
    return HostPlaces(dict(zip(values, at.tolist(), strict=True)), size)
