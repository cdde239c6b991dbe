"""Decisions about graphs compared with published results: tables of docs/benchmarks.md.

    python tests/benchmarks/rewriting.py [--quick] [--only PART ...]

Graphs are traced without memory, times are a roofline's at 4 TFLOPS and 200 GB/s, the link's 12 GB/s each
way. Parameters, gradients and the momentum of SGD are counted. ``--quick`` prints some of the rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from networks import resnet
from rewriting_networks import Additive, Isensee, UNet3d
from sized import Sized, largest
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from published_rules import budget_of, tune

from solvers.errors import PlanError
from solvers.rewriting import Rewriting, apply_rewriting
from solvers.rewriting.decide import Decider, least_limit
from solvers.rewriting.judge import simulate
from solvers.rewriting.step_conversion import graph_step, offloadable
from solvers.swap import Link, LinkBound

if TYPE_CHECKING:
    from collections.abc import Callable

    from solvers.rewriting import Graph
    from solvers.rewriting.decide import Decision

TWELVE = Link.of_rate(12e9)


class Classified(nn.Module):
    """A model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(x), y)


@cache
def residual(depth: int) -> Sized:
    return Sized(
        lambda: Classified(resnet(depth, cifar=False, classes=1000)),
        lambda batch: (torch.empty(batch, 3, 224, 224), torch.empty(batch, dtype=torch.long)),
    )


@cache
def volume(kind: type[nn.Module], channels: int) -> Sized:
    return Sized(
        lambda: Classified(kind()),
        lambda n: (torch.empty(1, channels, n, n, n), torch.empty(1, n, n, n, dtype=torch.long)),
    )


@cache
def attention(length: int, words: int, *, joined: bool) -> Sized:
    return Sized(
        lambda: Additive(words=words, joined=joined),
        lambda batch: (torch.zeros(batch, length, dtype=torch.long),) * 2,
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


def plainly(graph: Graph, limit: float) -> bool:
    return simulate(graph, TWELVE).peak_bytes <= limit


def somehow(graph: Graph, limit: float) -> bool:
    return least_limit(graph, TWELVE)[0] <= limit


def ends(graph: Callable[[int], Graph], limit: float, step: int = 1) -> tuple[int, int]:
    """The largest size that fits plainly, and the largest that fits somehow; multiples of a step."""
    plain = largest(lambda n: plainly(graph(n * step), limit), 4)
    return step * plain, step * largest(lambda n: somehow(graph(n * step), limit), plain)


def bound(graph: Graph, limit: float) -> float:
    """Return a lower bound in seconds on the stall of any offload schedule of the movable values."""
    return LinkBound(graph_step(graph, offloadable(graph)).step, TWELVE).stall_seconds(int(limit))


def decided(graph: Graph, limit: float, *, offload: bool = True, again: bool = True) -> Decision | str:
    none = np.zeros(len(graph.size), bool)
    ways = {} if offload else {"movable": none}
    ways |= {} if again else {"repeatable": none}
    try:
        return Decider(graph, TWELVE, **ways).decide(int(limit))
    except PlanError as error:
        return str(error)


def slower(made: Decision | str) -> str:
    return (
        "cannot" if isinstance(made, str) else percent(made.seconds - made.plain_seconds, made.plain_seconds)
    )


def row_of(graph: Graph, limit: float, *first: object) -> None:
    """A graph within a limit."""
    begin = time.process_time()
    ours = decided(graph, limit)
    spent = time.process_time() - begin
    if isinstance(ours, str):
        row(*first, gb(limit), "cannot", ours)
        return
    row(
        *first,
        gb(limit),
        f"{ours.plain_seconds:.3f}",
        gb(ours.plain_peak_bytes),
        slower(ours),
        percent(ours.stall_seconds, ours.plain_seconds),
        percent(ours.recomputed_seconds, ours.plain_seconds),
        slower(decided(graph, limit, again=False)),
        percent(bound(graph, limit), ours.plain_seconds),
        gb(ours.moved_bytes),
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
        plain, most = ends(family.near, limit)
        sizes = [int(times * plain) for times in (1, 1.5, 2, 3, 4.9)] + [most]
        for batch in (sizes[0], sizes[-2]) if quick else sizes:
            row_of(family.at(batch), limit, batch, f"{batch / plain:.1f}x")


def deep(*, quick: bool) -> None:
    head("ResNet-152 at 224, batch 256", "batch", *COLUMNS)
    for limit in (14.4e9,) if quick else (14.4e9, 10.8e9):
        row_of(residual(152).cheapest(256), limit, 256)


def volumes(*, quick: bool) -> None:
    head(
        "3D U-Nets, one volume, 14.4e9 bytes", "network", "side", "of plain's side", "voxels", *COLUMNS
    )  # fmt: skip
    kinds: list[tuple[str, Any, int, int]] = [
        ("Isensee et al.", Isensee, 4, 16),
        ("Çiçek et al.", UNet3d, 1, 8),
    ]
    for name, kind, channels, step in kinds[:1] if quick else kinds:
        family = volume(kind, channels)
        plain, most = ends(family.at, 14.4e9, step)
        for side in (plain, most) if quick else sorted({plain, (plain + most) // 2 // step * step, most}):
            row_of(family.at(side), 14.4e9, name, side, f"{side / plain:.2f}x", f"{(side / plain) ** 3:.1f}x")


_PUBLISHED = {50: (350, 1100), 100: (90, 550), 200: (20, 230), 400: (2, 60)}


def of_attention(graph: Graph) -> tuple[int, ...]:
    """Values T x B x H, or larger, that a word of the target keeps."""
    kinds = np.array([graph.kinds[k].removeprefix("aten.") for k in graph.kind])
    where = np.array(["", *graph.modules])[graph.module + 1]
    made = np.isin(kinds, ("add", "cat", "mm", "addmm", "tanh", "bmm")) & ~graph.backward
    made &= np.isin(where, ("", "both"))
    tanh = graph.size[np.isin(graph.producer, np.flatnonzero((kinds == "tanh") & ~graph.backward))].max()
    owned = (graph.producer >= 0) & (graph.size >= tanh)
    owned[owned] &= made[graph.producer[owned]]
    return tuple(np.flatnonzero(owned & (graph.base == np.arange(len(graph.base)))).tolist())


def recomputed(graph: Graph) -> Graph:
    return apply_rewriting(graph, Rewriting(recomputed=of_attention(graph)))


def words(*, quick: bool) -> None:
    for joined in (True, False):
        score = "v . tanh(W [word; state])" if joined else "v . tanh(Keys + Query)"
        head(
            f"{score}, H = 1024, 16,000 words, 12e9 bytes",
            "T", "plain batch", "not kept: batch", "ratio", "slower", "ours there",
            "batch by published ratio, or the largest", "ours there", "published", "ratio",
        )  # fmt: skip
        for length in (50,) if quick else (50, 100, 200, 400):
            of_words(attention(length, 16000, joined=joined), length)


def of_words(family: Sized, length: int) -> None:
    near = partial(family.near, small=2, large=32)
    plain = largest(lambda batch: plainly(near(batch), 12e9))
    less = largest(lambda batch: plainly(recomputed(near(batch)), 12e9), plain)
    again, once = simulate(recomputed(near(less)), TWELVE), simulate(near(less), TWELVE)
    base, swapped = _PUBLISHED[length]
    wanted = round(plain * swapped / base)
    if not somehow(near(wanted), 12e9):
        wanted = largest(lambda batch: somehow(near(batch), 12e9), less)
    ours = [slower(decided(near(one), 12e9)) for one in (less, wanted)]
    row(
        length, plain, less, f"{less / plain:.1f}", percent(again.seconds - once.seconds, once.seconds),
        ours[0], wanted, ours[1],
        f"{base} to {swapped}", f"{swapped / base:.1f}",
    )  # fmt: skip


def tuner(*, quick: bool) -> None:
    """The published rules and tuner, judged as ours are."""
    head(
        "ResNet-50 at 224: the published tuner, by our judge",
        "batch", "limit GB", "threshold", "ahead", "group", "simulations", "its peak GB", "slower", "ours",
    )  # fmt: skip
    family, limit = residual(50), 14.4e9
    for batch in (326,) if quick else (183, 244, 326, 489, 798):
        graph = family.at(batch)
        found = tune(graph, budget_of(graph, int(limit)))
        rules = found.rules
        told = simulate(apply_rewriting(graph, found.rewriting), TWELVE)
        plain = simulate(graph, TWELVE).seconds
        settings = ("", "", "") if rules is None else (rules.threshold, rules.ahead, rules.group)
        row(
            batch, gb(limit), *settings, found.simulations, gb(told.peak_bytes),
            percent(told.seconds - plain, plain) if found.fits else "refuses", slower(decided(graph, limit)),
        )  # fmt: skip


PARTS = {"batches": batches, "tuner": tuner, "deep": deep, "volumes": volumes, "attention": words}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    for name in chosen.only:
        PARTS[name](quick=chosen.quick)


if __name__ == "__main__":
    main()
