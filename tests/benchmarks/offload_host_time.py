"""Host time of a training step within a limit, beside the same step without a limit.

    python tests/benchmarks/offload_host_time.py [--programs gpt ...] [--shares 0.8 0.6 0.4] [--rounds 3]

Needs a CUDA build of PyTorch, and no GPU: the programs run on the stand-in, where kernels and copies take no
time, so that host time is all there is. Each run is a process of its own; runs with and without a limit take
turns. A figure is the median of medians, in seconds of processor, over the last steps. ``limit`` is
a share of the live peak without a limit; 1.2 leaves room for everything.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import on_standin
from on_standin import in_child

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

MIB = 1 << 20
STEPS, LAST = 60, 20


def language_model(
    width: int, layers: int, heads: int, words: int, length: int, batch: int
) -> Callable[[], None]:
    """Return the step of a GPT with a fused attention and AdamW."""
    import torch
    from torch import nn
    from torch.nn import functional
    from workloads import Layer

    with torch.device("cuda"):
        model = nn.Sequential(
            nn.Embedding(words, width),
            *(Layer(width, heads) for _ in range(layers)),
            nn.LayerNorm(width),
            nn.Linear(width, words),
        )
        tokens = torch.randint(0, words, (batch, length))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pictures() -> Callable[[], None]:
    """Return the step of a ResNet-50 with SGD."""
    import torch
    from networks import resnet
    from torch.nn import functional

    model = resnet(50, cifar=False, inplace=False, classes=1000).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    batch, labels = (
        torch.randn(64, 3, 224, 224, device="cuda"),
        torch.zeros(64, dtype=torch.long, device="cuda"),
    )

    def step() -> None:
        functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def cells() -> Callable[[], None]:
    """Return the step of an LSTM of 64 unrolled cells."""
    import torch
    from torch import nn

    cell, head = nn.LSTMCell(512, 512).cuda(), nn.Linear(512, 512).cuda()
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])
    batch = torch.randn(64, 256, 512, device="cuda")

    def step() -> None:
        state, loss = None, 0
        for x in batch:
            state = cell(x, state)
            loss = loss + head(state[0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


PROGRAMS: dict[str, Callable[[], Callable[[], None]]] = {
    "gpt": lambda: language_model(768, 12, 12, 50257, 1024, 8),
    "llama": lambda: language_model(2048, 16, 32, 32000, 2048, 2),
    "resnet": pictures,
    "lstm": cells,
}


def run(name: str, limit: int, host_limit: str | None = None) -> dict[str, Any]:
    """Train in this process; return the seconds of a step, and the peak in bytes."""
    import torch

    import mempool.torch

    within = {"limit": limit, "host_limit": host_limit} if limit else {}
    pool = mempool.torch.install(device="cuda", backend="pluggable", background=False, **within)
    step, seconds = PROGRAMS[name](), []
    for _ in range(STEPS):
        begin = time.process_time()
        step()
        seconds.append(time.process_time() - begin)
        pool.plan_now()
    values = pool.report().to_dict().get("swapping") or {}
    return {
        "seconds": statistics.median(seconds[-LAST:]),
        "live": pool.client.stats()["live"]["peak"],
        "reserved": torch.cuda.max_memory_reserved(),
        "moved": values.get("iteration_out_bytes", 0) + values.get("iteration_in_bytes", 0),
        "moves": values.get("moves"),
        "values": values,
    }


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--shares", nargs="+", type=float, default=[1.2, 0.8, 0.6])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--host-limit", help="most host memory for copies; the default is half of the free")
    options = parser.parse_args()
    with on_standin.loaded():
        compare(options.programs, options.shares, options.rounds, options.host_limit)


def compare(programs: list[str], shares: list[float], rounds: int, host_limit: str | None) -> None:
    """Print a line for each program and share of the peak."""
    import torch
    import torch._dynamo  # for all processes, as a limit imports it

    import mempool.torch

    print(f"PyTorch {torch.__version__}, mempool at {mempool.torch.__file__}")
    for name in programs:
        live = in_child(run, name, 0)["live"]
        for share in shares:
            pairs = [
                (in_child(run, name, int(share * live), host_limit), in_child(run, name, 0))
                for _ in range(rounds)
            ]
            within, without = (
                statistics.median(one["seconds"] for one in column) for column in zip(*pairs, strict=True)
            )
            last = pairs[-1][0]
            print(
                f"{name:8} limit {share:.2f}: {1e3 * within:7.1f} ms, without {1e3 * without:6.1f} ms:"
                f" {within / without:5.2f} x; moves {last['moves']}, moved {last['moved'] / MIB:,.0f} MiB;"
                f" reserved {last['reserved'] / live:.3f}; {last['values'].get('bypassed')} bypassed,"
                f" {last['values'].get('diverged')} diverged, {last['values'].get('evicted')} evicted,"
                f" {last['values'].get('on_demand')} on demand",
                flush=True,
            )


if __name__ == "__main__":
    main()
