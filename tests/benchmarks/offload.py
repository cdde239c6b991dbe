"""Training within less memory on a modelled GPU: PyTorch's ways beside ours, time of a step and peak.

    python tests/benchmarks/offload.py --card H100 --link pcie5 [--only MODEL ...] [--ways WAY ...]

Needs a CUDA build of PyTorch and a C++ compiler, and no GPU: each run is a process on the stand-in, whose
kernels take the roofline's time of the card and whose copies take the link's (`mempool.rehearsal.clock`). The
host takes no time. First come the peers, then ours within the peak of each of them, and within shares of the
plain peak. A way that fails prints the last line of its error.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import on_standin
from on_standin import in_child

from mempool.hardware.gpu_memory import card
from mempool.hardware.gpu_throughput import rates_of
from mempool.rehearsal import clock
from solvers.swap.link import parse_link

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch"))

if TYPE_CHECKING:
    from collections.abc import Callable

    from models import Model

GB = 1e9
PEERS = ("save_on_cpu", "save_on_cpu, pageable", "offload, streams", "checkpoint", "budget 0.5", "budget 0.1")
SHARES = (0.8, 0.6, 0.4)
STEPS = 14  #: steps of a run; the last is told, when all plans are made


def models() -> dict[str, tuple[Callable[[], Model], int, bool]]:
    """Return constructor, batch, and whether it runs in bfloat16 by autocast, of each model."""
    from models import GPT, ResNet

    class Long(GPT):
        words, length = 50304, 1024

    class Large(ResNet):
        side = 128

    return {
        "GPT-2": (lambda: Long(768, 12), 16, False),
        "GPT-2, bfloat16": (lambda: Long(768, 12), 16, True),
        "ResNet-18": (lambda: Large(64), 256, False),
    }


def _hooks(way: str) -> Any:
    from offloading import LastKept, Stream
    from torch.autograd.graph import save_on_cpu

    if way.startswith("save_on_cpu"):
        return save_on_cpu(pin_memory=way == "save_on_cpu")
    return LastKept(Stream()) if way.startswith("offload") else contextlib.nullcontext()


def _compiled(way: str, limit: int | None, beside: int) -> dict[str, Any] | None:
    """Return the arguments of `torch.compile` for a way, None to run the program as is."""
    from rewriting_peers import budgeted

    if way.startswith("budget"):
        return {"backend": budgeted(float(way.split()[1]))}
    if way != "ours, compiled":
        return None
    from mempool.torch.compiled import backend

    backend.register()
    options = {"inner": "eager", "limit": limit, "beside": beside}
    return {"backend": "mempool", "options": options}


def train(way: str, name: str, limit: int | None, gpu: str, link: str) -> dict[str, Any]:
    """Train in this process; return the modelled seconds of the last step and the bytes at the peak."""
    import torch

    import mempool.torch

    chosen = card(gpu)
    clock.start(rates_of(chosen.name, chosen.capability), parse_link(link))
    pool = None
    if way == "ours":
        pool = mempool.torch.install(device="cuda", backend="pluggable", background=False, limit=limit)
    make, size, half = models()[name]
    torch.manual_seed(0)
    model = make().cuda()
    model.checkpointing = way == "checkpoint"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    asked = _compiled(way, limit, 2 * sum(one.nbytes for one in model.parameters()))
    loss_of = model.loss if asked is None else torch.compile(model.loss, **asked)
    batch = [part.cuda() for part in model.batch(0, size)]
    seconds = peak = 0.0
    for _ in range(STEPS if pool is not None else 4):
        hooks = _hooks(way)
        (torch.cuda.reset_peak_memory_stats if pool is None else pool.client.reset_peaks)()
        begin = clock.now()
        optimizer.zero_grad()
        with hooks, torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        loss.item()
        if isinstance(hooks, _last_kept()):
            hooks.end_of_step()
        del loss
        seconds = clock.now() - begin
        peak = torch.cuda.max_memory_allocated() if pool is None else pool.client.stats()["live"]["peak"]
        if pool is not None:
            pool.plan_now()
    told = {"seconds": seconds, "peak": int(peak)}
    if pool is not None:
        told["values"] = pool.report().to_dict().get("swapping") or {}
    return told


def _last_kept() -> Any:
    from offloading import LastKept

    return LastKept


def compare(name: str, ways: list[str], gpu: str, link: str) -> None:
    """Print a line for each way of a model."""
    print(f"\n### {name}\n\n| way | limit GB | peak GB | of plain | ms a step | slower | predicted ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    plain: dict[str, Any] = {}

    def measure(label: str, way: str, limit: int | None = None) -> dict[str, Any]:
        try:
            row = in_child(train, way, name, limit, gpu, link)
        except SystemExit as error:
            print(f"| {label} | {str(error).strip().splitlines()[-1][:160]} |", flush=True)
            return {}
        base = plain or row
        stall = row.get("values", {}).get("planned_stall_seconds")
        cells = (
            label,
            "" if limit is None else f"{limit / GB:.2f}",
            f"{row['peak'] / GB:.2f}",
            f"{row['peak'] / base['peak']:.1%}",
            f"{1e3 * row['seconds']:.1f}",
            f"{row['seconds'] / base['seconds'] - 1:+.1%}",
            "" if stall is None else f"{1e3 * (base['seconds'] + stall):.1f}",
        )
        print("|", " | ".join(cells), "|", flush=True)
        if "values" in row and DEBUG: print(row["values"])
        return row

    plain = measure("native", "native")
    peers = {way: measure(way, way) for way in PEERS if way in ways}
    for way, row in peers.items():
        if row:
            measure(f"ours, in the peak of {way}", "ours", row["peak"])
    for share in SHARES:
        for way in ("ours", "ours, compiled"):
            if way in ways:
                measure(f"{way}, {share:.0%}", way, int(share * plain["peak"]))

DEBUG = False

def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--card", default="H100")
    parser.add_argument("--link", default="pcie5")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--ways", nargs="+", default=[*PEERS, "ours", "ours, compiled"])
    options = parser.parse_args()
    with on_standin.loaded():
        import torch
        import torch._dynamo  # for all processes

        print(f"PyTorch {torch.__version__}, {options.card}, {options.link}")
        for name in options.only or models():
            compare(name, options.ways, options.card, options.link)


if __name__ == "__main__":
    main()
