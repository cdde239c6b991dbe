"""Find the sizes up to which a graph with dynamic shapes stays within the limit, and guard them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from solvers.rewriting.judge import simulate
from solvers.swap import Link

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mempool.torch.compiled.graph_budget import Part

_DOUBLINGS, _HALVINGS = 16, 6


def hold_up_to(inputs: Sequence[Any], part: Part) -> None:
    """Recompile the graph when a dynamic size exceeds the sizes for which the decision holds.

    If values are offloaded or recomputed, the decision holds only up to the current sizes. Otherwise the
    decision holds until the graph exceeds the limit with all sizes grown by the same factor.

    Args:
        inputs: the inputs of the graph; the symbolic integers among them are the dynamic sizes.
        part: the decision about the graph.

    Raises:
        ValueError: a size is already larger than those of the decision.
    """
    sizes = [one for one in inputs if isinstance(one, torch.SymInt) and not one.node.is_nested_int()]
    factor = _factor(part, {one.node.expr: one.node.hint for one in sizes}) if sizes else 1.0
    for size in sizes:
        if size > int(size.node.hint * factor):  # the comparison creates a guard
            raise ValueError(f"{size} is larger than what was decided for")


def _factor(part: Part, hints: Mapping[Any, int]) -> float:
    """Return the largest factor for all sizes with which the graph fits unchanged; 1 if values move."""
    made, limit = part.decided, part.options.limit or 0
    if made.moves or made.peak_bytes > limit:
        return 1.0

    def fits(factor: float) -> bool:
        return _peak(part, {symbol: int(hint * factor) for symbol, hint in hints.items()}, factor) <= limit

    low = 1.0
    for _ in range(_DOUBLINGS):
        if not fits(2 * low):
            break
        low *= 2
    high = 2 * low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _peak(part: Part, sizes: Mapping[Any, int], factor: float) -> int:
    """Return the peak in bytes of the graph with other sizes.

    Values whose size does not follow from `sizes` grow by the largest growth among the other values.
    """
    made, beside = part.decided, part.options.beside
    graph = made.captured.graph
    grown = graph.size.astype(np.float64)
    unknown = []
    for value, (held, node) in enumerate(zip(made.captured.sizes, made.captured.values, strict=True)):
        if isinstance(held, torch.SymInt) and held.node.expr.free_symbols <= sizes.keys():
            grown[value] = int(held.node.expr.xreplace(sizes))
        elif isinstance(held, torch.SymInt) or (node is not None and _changes(node.meta.get("val"))):
            unknown.append(value)
    most = max(factor, float((grown / np.maximum(graph.size, 1)).max(initial=1.0)))
    grown[unknown] *= most
    outside = max(made.outside.during(backward=backward) for backward in (False, True))
    outside = beside + int((outside - beside) * most)
    larger = graph.with_columns(size=np.ceil(grown), workspace=np.ceil(graph.workspace * most))
    needs = simulate(larger, Link.of_rate(1.0), outside_bytes=outside).peak_bytes
    more = made.peak_bytes - made.timed.peak_bytes  # need of the kernels beyond the need of the operations
    return (
        needs + int(more * most) if more > 0 else math.ceil(needs * made.peak_bytes / made.timed.peak_bytes)
    )


def _changes(held: Any) -> bool:
    """Return true if a tensor's shape is symbolic; the memory of an input keeps the traced size anyway."""
    return isinstance(held, torch.Tensor) and any(isinstance(one, torch.SymInt) for one in held.shape)
