"""Graphs without a backward pass: no value is saved, so nothing moves at any limit."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from mempool.torch.compiled.capture import capture
from mempool.torch.compiled.inductor.kernels import Kernels
from mempool.torch.compiled.merged_graph import output_of
from solvers.rewriting.judge import simulate
from solvers.swap.link import Link

if TYPE_CHECKING:
    from torch import fx

    from solvers.rewriting import Graph


def needs(graph: fx.GraphModule, outside_bytes: int) -> int:
    """Return the peak in bytes of a graph that runs unchanged, outside bytes included."""
    captured = _captured(graph)
    return simulate(captured, Link.of_rate(1.0), outside_bytes=outside_bytes).peak_bytes


def kernels_of(graph: fx.GraphModule, outside_bytes: int, limit: int) -> Kernels:
    """Return a pass over the inductor kernels of a graph that counts the bytes in use."""
    captured = _captured(graph)
    given = int(captured.size[(captured.producer < 0) & ~captured.host].sum())
    return Kernels(outside_bytes + given, {}, {}, limit=limit)


def warn(needed: int, limit: int) -> None:
    """Warn if a graph needs more than the limit."""
    if needed > limit:
        warnings.warn(
            f"a graph has no backward pass, and needs {needed} bytes where the limit is {limit}: "
            "it runs all the same, as it is",
            stacklevel=2,
        )


def _captured(graph: fx.GraphModule) -> Graph:
    (returned,) = output_of(graph).args
    return capture(graph, len(returned)).graph
