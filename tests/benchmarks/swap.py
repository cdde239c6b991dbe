"""Offload schedules compared with the link bound and with published results: tables of docs/benchmarks.md.

``python tests/benchmarks/swap.py [--only PART ...]`` prints them in the order of `PARTS`.

Steps are recorded on fake tensors, their times are a roofline's (`modelled.py`); every schedule passes the
judge. The optimizer is SGD with momentum.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from modelled import training_trace
from networks import resnet, vgg

from mempool.hardware.gpu_throughput import Rates
from mempool.hardware.roofline import Roofline
from solvers import PlanError, Stop, solve
from solvers.swap import PRESETS, Link, OffloadPlanner, Step, reduce_fragmentation, step_of
from solvers.swap.placement import device_buffers

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from link_bound import LinkBound

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from solvers.swap import Schedule

SINGA = PRESETS["singa"]
#: Number of intervals of the link bound: tighter than the default, for which a user would wait.
INTERVALS = 96
#: 12 GB/s each way.
TWELVE = Link.of_rate(12e9)


def step(model: Callable[[], nn.Module], batch: int, side: int, tflops: float, gbs: float = 200.0) -> Step:
    """Return one steady iteration of training."""
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


def reduction(part: int, whole: int) -> str:
    return f"{100 * (1 - part / whole):.1f} %"


CIFAR: dict[str, Callable[[], nn.Module]] = {
    "VGG-16": lambda: vgg(16),
    "VGG-19": lambda: vgg(19),
    "ResNet-18": lambda: resnet(18),
    "ResNet-50": lambda: resnet(50),
}


def cifar() -> None:
    """Print the least peak without a stall, and the link bound on the peak."""
    head(
        "Without a stall: batch 100 at 32x32, 200 GB/s, SINGA's link",
        "model", "TFLOPS", "step ms", "peak GB", "held GB", "less", "link bound", "above it", "plan s",
    )  # fmt: skip
    for tflops in (4.0, 10.0):
        for name, model in CIFAR.items():
            one = step(model, 100, 32, tflops)
            begin = time.process_time()
            planner = OffloadPlanner(one, SINGA)
            free = planner.without_stall()
            spent = time.process_time() - begin
            bound, top = LinkBound(one, SINGA).peak_bytes(), one.peak_bytes
            row(
                name, tflops, f"{one.duration * 1e3:.1f}", gb(top), gb(free.peak_bytes),
                reduction(free.peak_bytes, top), reduction(bound, top),
                f"{100 * (free.peak_bytes / bound - 1):.1f} %", f"{spent:.2f}",
            )  # fmt: skip


def holding() -> None:
    """Print the planner's stall at limits below the least peak without a stall, and the link bound."""
    head(
        "Holding a limit: VGG-16 and ResNet-50, batch 100 at 32x32, 4 TFLOPS, 200 GB/s, SINGA's link",
        "model", "limit of peak", "slower", "at least",
    )  # fmt: skip
    for name in ("VGG-16", "ResNet-50"):
        one = step(CIFAR[name], 100, 32, 4.0)
        planner, bound = OffloadPlanner(one, SINGA), LinkBound(one, SINGA, intervals=INTERVALS)
        for share in (60, 50, 40, 30):
            limit = one.peak_bytes * share // 100
            if limit < planner.floor()[0]:
                continue
            ours = planner.hold(limit)
            row(
                name,
                f"{share} %",
                slowdown(one, ours.stall_seconds),
                slowdown(one, bound.stall_seconds(limit)),
            )


def slowdown(one: Step, stall: float) -> str:
    return f"{100 * stall / one.duration:.1f} %"


def limited(
    title: str, cases: list[tuple[str, Callable[[], nn.Module], int, float, float]], goal: str
) -> None:
    """Print the planner's stall for cases of (name, model, batch, TFLOPS, limit)."""
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
        planner = OffloadPlanner(one, TWELVE)
        cells = [name, batch, tflops, f"{one.duration:.3f}", gb(one.peak_bytes), gb(limit)]
        try:
            held = planner.hold(limit)
        except PlanError as error:
            row(*cells, "cannot", str(error), "", "")
            continue
        bound = LinkBound(one, TWELVE, intervals=INTERVALS).stall_seconds(limit)
        row(*cells, slowdown(one, held.stall_seconds), slowdown(one, bound), gb(held.replayed.host_bytes), "")


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


def gaps() -> None:
    """Print the arena beyond the peak before and after `reduce_fragmentation`, at several limits."""
    shares = (85, 70, 57, 45)
    head(
        "Gaps of the arena: batch 100 at 32x32, 4 TFLOPS, SINGA's link", "model", *(f"{s} %" for s in shares)
    )
    for name in ("VGG-16", "ResNet-50"):
        one = step(CIFAR[name], 100, 32, 4.0)
        planner, cells = OffloadPlanner(one, SINGA), []
        for share in shares:
            swap = planner.hold(one.peak_bytes * share // 100)
            made = reduce_fragmentation(
                planner, swap, lambda schedule, one=one: arena_of(one, schedule, 200_000)
            )
            before, after = (
                100 * (arena_of(one, each.schedule, 10_000_000) / each.peak_bytes - 1)
                for each in (swap, made)
            )
            cells.append(f"{before:.1f} % to {after:.1f} %")
        row(name, *cells)


def arena_of(one: Step, schedule: Schedule, nodes: int) -> int:
    return solve(device_buffers(one, schedule)[0], stop=Stop(nodes=nodes)).arena_bytes


def synthetic_step(operations: int) -> Step:
    """Return a synthetic training step with parameters, optimizer state and activations of random sizes."""
    random, layers = np.random.default_rng(0), operations // 12
    k, buffers = 12 * layers, list[tuple[int, bool, list[tuple[int, bool]]]]()
    for layer in range(layers):
        ahead, back, update = 4 * layer, 8 * layers - 4 - 4 * layer, 8 * layers + 4 * layer
        size, weights = int(random.integers(1, 40)) << 20, int(random.integers(1, 8)) << 18
        for j in range(4):
            at, read = ahead + j, back + 3 - j
            ops = {at: True, at + 1: False, read: False} if at + 1 < 4 * layers else {at: True, read: False}
            buffers.append((size if j % 2 == 0 else size // 3, False, sorted(ops.items())))
        buffers.append((weights, True, [(ahead, False), (back + 3, False), (update, True)]))
        buffers.append((weights, True, [(update, True)]))
        buffers.append((weights, False, [(back + 2, True), (update, False)]))
    return Step(
        seconds=random.uniform(3e-4, 6e-3, k),
        operation=np.full(k, -1),
        start=np.array([0 if stays else ops[0][0] for _, stays, ops in buffers]),
        end=np.array([k if stays else ops[-1][0] + 1 for _, stays, ops in buffers]),
        size=np.array([size for size, _, _ in buffers]),
        persistent=np.array([stays for _, stays, _ in buffers]),
        ids=np.arange(len(buffers)),
        access_buffer=np.array([b for b, (_, _, ops) in enumerate(buffers) for _ in ops]),
        access_op=np.array([op for _, _, ops in buffers for op, _ in ops]),
        access_writes=np.array([writes for _, _, ops in buffers for _, writes in ops]),
        circular=True,
    )


def speed() -> None:
    """Print planning times of synthetic steps at limits from the floor to the least peak without a stall."""
    head(
        "Speed", "operations", "absences", "link", "limit", "slower", "made s", "planned s",
    )  # fmt: skip
    for operations, slow in ((10_000, False), (10_000, True), (100_000, False), (100_000, True)):
        one, link = synthetic_step(operations), Link.of_rate(1e9) if slow else SINGA
        begin = time.process_time()
        planner = OffloadPlanner(one, link)
        made, begin = time.process_time() - begin, time.process_time()
        free = planner.without_stall()
        said = [operations, len(planner.absences), "1 GB/s" if slow else "SINGA's"]
        row(*said, "free", "0.0 %", f"{made:.1f}", f"{time.process_time() - begin:.1f}")
        floor = planner.floor()[0]
        for share in (0.9, 0.5, 0.1):
            begin = time.process_time()
            held = planner.hold(floor + int(share * (free.peak_bytes - floor)))
            spent = time.process_time() - begin
            row(*said, f"{share:.0%} of the way", slowdown(one, held.stall_seconds), "", f"{spent:.1f}")


PARTS = {
    "cifar": cifar,
    "holding": holding,
    "batches": batches,
    "deep": deep,
    "large": large,
    "gaps": gaps,
    "speed": speed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    for name in parser.parse_args().only:
        PARTS[name]()


if __name__ == "__main__":
    main()
