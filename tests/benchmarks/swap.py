"""What swapping reaches, beside the link bound and what others published: tables of docs/swapping.md.

``python tests/benchmarks/swap.py [--only PART ...]`` prints them in the order of `PARTS`.

Steps are recorded on fake tensors, their times are a roofline's (`modelled.py`); every schedule passes the
judge. The optimizer is SGD with momentum.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from modelled import training_trace
from networks import resnet, vgg

from mempool.rates import Rates
from mempool.torch.fitting.roofline import Roofline
from solvers import PlanError
from solvers.swap import PRESETS, Link, LinkBound, Step, SwapPlanner, step_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

SINGA = PRESETS["singa"]
#: 12 GB/s each way.
TWELVE = Link.of_rate(12e9)


def step(model: Callable[[], nn.Module], batch: int, side: int, tflops: float, gbs: float = 200.0) -> Step:
    """One steady iteration of training."""
    rate = tflops * 1e12
    profile = Roofline(Rates("", gbs * 1e9, rate, rate, rate, ""))
    return step_of(training_trace(model, (batch, 3, side, side), profile))


def row(*cells: object) -> None:
    print("|", " | ".join(str(cell) for cell in cells), "|", flush=True)


def head(title: str, *cells: str) -> None:
    print(f"\n### {title}\n")
    row(*cells)
    row(*["---"] * len(cells))


def gb(size: int) -> str:
    return f"{size / 1e9:.3f}"


def less(part: int, whole: int) -> str:
    return f"{100 * (1 - part / whole):.1f} %"


CIFAR: dict[str, Callable[[], nn.Module]] = {
    "VGG-16": lambda: vgg(16),
    "VGG-19": lambda: vgg(19),
    "ResNet-18": lambda: resnet(18),
    "ResNet-50": lambda: resnet(50),
}


def cifar() -> None:
    """Without any stall, batch 100, 32x32, SINGA's link."""
    head(
        "Without a stall: batch 100 at 32x32, 200 GB/s, SINGA's link",
        "model", "TFLOPS", "step ms", "peak GB", "held GB", "less", "link bound", "above it", "published",
        "plan s",
    )  # fmt: skip
    for tflops in (4.0, 10.0):
        for name, model in CIFAR.items():
            one = step(model, 100, 32, tflops)
            begin = time.process_time()
            planner = SwapPlanner(one, SINGA)
            free = planner.without_stall()
            spent = time.process_time() - begin
            bound, top = LinkBound(one, SINGA).peak_bytes(), one.peak_bytes
            row(
                name, tflops, f"{one.duration * 1e3:.1f}", gb(top), gb(free.peak_bytes), less(free.peak_bytes,
                top), less(bound, top), f"{100 * (free.peak_bytes / bound - 1):.1f} %",
                less(planner.published_without_stall().peak_bytes, top), f"{spent:.2f}",
            )  # fmt: skip


def holding() -> None:
    """Below what is free: ours, the best published score, the bound."""
    head(
        "Holding a limit: VGG-16 and ResNet-50, batch 100 at 32x32, 4 TFLOPS, 200 GB/s, SINGA's link",
        "model", "limit of peak", "slower, ours", "best published", "of score", "at least",
    )  # fmt: skip
    for name in ("VGG-16", "ResNet-50"):
        one = step(CIFAR[name], 100, 32, 4.0)
        planner, bound = SwapPlanner(one, SINGA), LinkBound(one, SINGA)
        for share in (60, 50, 40, 30):
            limit = one.peak_bytes * share // 100
            if limit < planner.floor()[0]:
                continue
            ours = planner.hold(limit)
            others = min(((o.stall_seconds, o.how) for o in planner.published(limit)), default=None)
            row(
                name, f"{share} %", slower(one, ours.stall_seconds),
                "cannot" if others is None else slower(one, others[0]),
                "" if others is None else others[1].removeprefix("published "),
                slower(one, bound.stall_seconds(limit)),
            )  # fmt: skip


def slower(one: Step, stall: float) -> str:
    return f"{100 * stall / one.duration:.1f} %"


def limited(
    title: str, cases: list[tuple[str, Callable[[], nn.Module], int, float, float]], goal: str
) -> None:
    """(name, model, batch, TFLOPS, limit in bytes or, up to 1, of the peak)."""
    head(
        title,
        "model",
        "batch",
        "TFLOPS",
        "step s",
        "peak GB",
        "limit GB",
        "slower",
        "at least",
        "host GB",
        goal,
    )
    for name, model, batch, tflops, most in cases:
        one = step(model, batch, 224, tflops)
        limit = int(most * one.peak_bytes) if most <= 1 else int(most)
        planner = SwapPlanner(one, TWELVE)
        cells = [name, batch, tflops, f"{one.duration:.3f}", gb(one.peak_bytes), gb(limit)]
        try:
            held = planner.hold(limit)
        except PlanError as error:
            row(*cells, "cannot", str(error), "", "")
            continue
        bound = LinkBound(one, TWELVE).stall_seconds(limit)
        row(*cells, slower(one, held.stall_seconds), slower(one, bound), gb(held.replayed.host_bytes), "")


def big(depth: int) -> Callable[[], nn.Module]:
    return lambda: resnet(depth, cifar=False, classes=1000)


def batches() -> None:
    sizes = (128, 144, 192, 256, 384, 512, 664)
    cases = [("ResNet-50", big(50), batch, rate, 12e9) for rate in (2.5, 4.0) for batch in sizes]
    limited("ResNet-50 at 224 within 12e9 bytes, 12 GB/s each way, 200 GB/s", cases, "Meng et al.: 664")


def deep() -> None:
    cases = [
        (f"ResNet-{depth}", big(depth), 32, rate, share)
        for depth, share in ((101, 0.46), (200, 0.29))
        for rate in (2.5, 4.0, 10.0)
    ]
    limited("54 % and 71 % less memory at batch 32", cases, "Meng et al.: under 10 %")


def large() -> None:
    cases = [("ResNet-152", big(152), 256, rate, 14.4e9) for rate in (4.0, 10.0)]
    vgg16 = lambda: vgg(16, cifar=False, norm=False)  # noqa: E731
    cases += [("VGG-16", vgg16, 256, rate, 12e9) for rate in (4.0, 10.0)]
    limited("Large batches", cases, "vDNN: VGG-16 18 %")


PARTS = {"cifar": cifar, "holding": holding, "batches": batches, "deep": deep, "large": large}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    for name in parser.parse_args().only:
        PARTS[name]()


if __name__ == "__main__":
    main()
