"""Decisions about graphs compared with published results: tables of docs/benchmarks.md.

    python tests/benchmarks/rewriting.py [--quick] [--only PART ...]

Graphs are traced without memory, times are a roofline's at 4 TFLOPS and 200 GB/s, the link's 12 GB/s each
way. Parameters, gradients and the momentum of SGD are counted. ``--quick`` prints some of the rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from networks import resnet
from torch import nn
from torch.nn import functional

from solvers.errors import PlanError
from solvers.rewriting import Graph
from solvers.rewriting.decide import Decider, Decision
from solvers.rewriting.judge import simulate
from solvers.rewriting.step_conversion import graph_step, offloadable
from solvers.swap import Link

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from link_bound import LinkBound
from sized import StepFamily, largest

TWELVE = Link.of_rate(12e9)


class Classified(nn.Module):
    """A model that returns its cross-entropy loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(x), y)


@cache
def residual(depth: int) -> StepFamily:
    return StepFamily(
        lambda: Classified(resnet(depth, cifar=False, classes=1000)),
        lambda batch: (torch.empty(batch, 3, 224, 224), torch.empty(batch, dtype=torch.long)),
    )


def row(*cells: object) -> None:
    print("|", " | ".join(str(cell) for cell in cells), "|", flush=True)


def head(title: str, *cells: str) -> None:
    print(f"\n### {title}\n")
    row(*cells)
    row(*["---"] * len(cells))


def gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"


def fits_without_rewriting(graph: Graph, limit: float) -> bool:
    return simulate(graph, TWELVE).peak_bytes <= limit


def fits_with_rewriting(graph: Graph, limit: float) -> bool:
    return Decider(graph, TWELVE).least()[0] <= limit


def largest_batches(graph: Callable[[int], Graph], limit: float) -> tuple[int, int]:
    """Return the largest batch that fits without rewriting, and the largest that fits with rewriting."""
    plain = largest(lambda n: fits_without_rewriting(graph(n), limit), 4)
    return plain, largest(lambda n: fits_with_rewriting(graph(n), limit), plain)


def bound(graph: Graph, limit: float) -> float:
    """Return a lower bound in seconds on the stall of any offload schedule of the movable values."""
    return LinkBound(graph_step(graph, offloadable(graph)).step, TWELVE).stall_seconds(int(limit))


def decide(graph: Graph, limit: float, *, again: bool = True) -> Decision | str:
    ways = {} if again else {"repeatable": np.zeros(len(graph.size), bool)}
    try:
        return Decider(graph, TWELVE, **ways).decide(int(limit))
    except PlanError as error:
        return str(error)


def slowdown(made: Decision | str, plain: float) -> str:
    return "cannot" if isinstance(made, str) else percent(made.seconds - plain, plain)


def row_of(graph: Graph, limit: float, *first: object) -> None:
    """Print the row of a graph within a limit."""
    begin = time.process_time()
    ours = decide(graph, limit)
    spent = time.process_time() - begin
    if isinstance(ours, str):
        row(*first, gb(limit), "cannot", ours)
        return
    plain = simulate(graph, TWELVE)
    row(
        *first,
        gb(limit),
        f"{plain.seconds:.3f}",
        gb(plain.peak_bytes),
        slowdown(ours, plain.seconds),
        percent(ours.stall_seconds, plain.seconds),
        percent(ours.simulation.recomputed_seconds, plain.seconds),
        slowdown(decide(graph, limit, again=False), plain.seconds),
        percent(bound(graph, limit), plain.seconds),
        gb(ours.simulation.moved_bytes),
        f"{spent:.1f}",
    )


COLUMNS = (
    "limit GB", "step s", "plain peak GB", "slower", "waits", "recomputes", "swapping alone",
    "its link bound", "moved GB", "decided s",
)  # fmt: skip


def batches(*, quick: bool) -> None:
    head("ResNet-50 at 224, float32, nine tenths of 16e9 and 12e9 bytes", "batch", "of plain's", *COLUMNS)
    family = residual(50)
    for limit in (14.4e9, 10.8e9):
        plain, most = largest_batches(family.interpolated_graph, limit)
        sizes = [int(times * plain) for times in (1, 1.5, 2, 3, 4.9)] + [most]
        for batch in (sizes[0], sizes[-2]) if quick else sizes:
            row_of(family.traced_graph(batch), limit, batch, f"{batch / plain:.1f}x")


def deep(*, quick: bool) -> None:
    head("ResNet-152 at 224, batch 256", "batch", *COLUMNS)
    for limit in (14.4e9,) if quick else (14.4e9, 10.8e9):
        row_of(residual(152).traced_graph(256), limit, 256)


PARTS = {"batches": batches, "deep": deep}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    for name in chosen.only:
        PARTS[name](quick=chosen.quick)


if __name__ == "__main__":
    main()
