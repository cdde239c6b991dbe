"""What to do with the values of a step, by the options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mempool.torch.rewriting.costs import number
from solvers.rewriting import Rewriting, Swap, SwapIn

if TYPE_CHECKING:
    from mempool.torch.rewriting.capture import Captured
    from mempool.torch.rewriting.options import Options
    from solvers.rewriting import Graph


def decided(captured: Captured, options: Options) -> Rewriting:
    """Which values leave, and which are made again; nothing without a limit."""
    if options.threshold is None:
        return Rewriting()
    return _beyond(decidable(captured), options.threshold)


def decidable(captured: Captured) -> Graph:
    """The graph in which only what we can send away may leave: of the forward pass, whole memories."""
    graph = captured.graph
    forward = ~graph.backward[graph.producer] & (graph.producer >= 0)
    whole = [node is not None and _is_whole(node.meta.get("val")) for node in captured.values]
    return graph.with_columns(movable=graph.movable & (forward & np.array(whole, bool))[graph.base])


def _is_whole(held: Any) -> bool:
    """Whether what a node makes is a tensor with all of its memory in the order of its elements."""
    if not isinstance(held, torch.Tensor) or held.layout != torch.strided or held.is_quantized:
        return False
    if held.is_conj() or held.is_neg() or number(held.storage_offset()):
        return False
    shape, strides = map(number, held.shape), map(number, held.stride())
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return bool(extent * held.element_size() >= number(held.untyped_storage().nbytes()) > 0)


def _beyond(graph: Graph, distance: int) -> Rewriting:
    """Every value of the forward pass that the backward pass reads more than so many operations later."""
    readers: dict[int, set[int]] = {}
    for value, reader in zip(graph.base[graph.reads].tolist(), graph.reader.tolist(), strict=True):
        if graph.backward[reader]:
            readers.setdefault(value, set()).add(reader)
    swaps = []
    for value, found in sorted(readers.items()):
        made = int(graph.producer[value])
        if graph.movable[value] and min(found) - made > distance:
            swaps.append(Swap(value, (SwapIn(tuple(sorted(found)), max(min(found) - 3, -1)),)))
    return Rewriting(tuple(swaps))
