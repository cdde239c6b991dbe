"""Plan the places of copies in the host arena: packed by lifetime before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mempool.torch.offload.host_memory import PAGE, pages
from mempool.torch.offload.host_placement import packed
from traces.buffers import Buffers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from solvers.rewriting import Graph, Rewriting


@dataclass(frozen=True)
class HostPlaces:
    """Offsets of copies in the host arena.

    Attributes:
        at: offset in bytes by value; values that are not offloaded have no entry.
        size: size of all copies together in bytes, in whole pages.
    """

    at: Mapping[int, int] = field(default_factory=dict)
    size: int = 0

    def behind(self, begin: int) -> HostPlaces:
        """Return the same places shifted by `begin` bytes."""
        return HostPlaces({value: begin + at for value, at in self.at.items()}, self.size)


def places_of(graph: Graph, rewriting: Rewriting) -> HostPlaces:
    """Plan the place of each offloaded value.

    A copy lives from the operation that makes the value to the last reader of a reload; if that reader runs a
    second time, to the end of the step.

    Args:
        graph: the step before the decisions are applied.
        rewriting: the decisions.
    """
    swaps = rewriting.offloads
    if not swaps:
        return HostPlaces()
    count = len(graph)
    values = [swap.value for swap in swaps]
    ends = [max((run for one in swap.reloads for run in one.consumers), default=count) for swap in swaps]
    sizes = [pages(int(size)) for size in graph.size[values]]
    buffers = Buffers.of(graph.producer[values], np.minimum(ends, count) + 1, sizes, alignment=PAGE)
    at, size = packed(buffers)
    return HostPlaces(dict(zip(values, at.tolist(), strict=True)), size)
