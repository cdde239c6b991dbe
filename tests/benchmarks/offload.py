"""Training within less memory on a modelled GPU: PyTorch's ways beside ours, time of a step and peak.

    python tests/benchmarks/offload.py [--card H100] [--link pcie5] [--only MODEL ...] [--ways WAY ...]

Needs a CUDA build of PyTorch and a C++ compiler, and no GPU: each run is a process on the stand-in, whose
kernels take the roofline's time of the card and whose copies take the link's (`mempool.rehearsal.clock`). The
host takes no time. First come the peers, then ours within the peak of each of them, and within shares of the
plain peak. *Predicted* is the plain time, and what our plan adds to it. A way that fails prints its error.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

import on_standin
import own_process
from on_standin import in_child

from mempool.hardware.gpu_memory import card
from mempool.hardware.gpu_throughput import rates_of
from mempool.rehearsal import clock
from solvers.swap.link import parse_link

if TYPE_CHECKING:
    from models import Model

PEERS = ("save_on_cpu", "save_on_cpu, pageable", "offload", "checkpoint", "budget 0.5", "budget 0.1")
OURS = ("ours", "ours, compiled")
SHARES = (0.8, 0.6, 0.4)
HOST_BYTES = 256 << 30  #: address space for copies; nothing is written to it
STEPS, STEPS_OF_OURS = 4, 16  #: steps of a run, of which the last is told; ours with all plans made
MODELS = {"GPT-2": False, "GPT-2, bfloat16": True, "ResNet-18": False}  #: whether autocast to bfloat16


def _hooks(way: str) -> Any:
    from offloading import LastKept, Stream
    from torch.autograd.graph import save_on_cpu

    if way.startswith("save_on_cpu"):
        return save_on_cpu(pin_memory=way == "save_on_cpu")
    return LastKept(Stream()) if way == "offload" else contextlib.nullcontext()


def _loss(way: str, model: Model, limit: int | None) -> Any:
    """Return the function of a batch's loss, compiled for ways that compile."""
    import torch
    from rewriting_peers import compiled

    if not way.startswith("budget") and way != "ours, compiled":
        return model.loss
    state = 2 * sum(one.nbytes for one in model.parameters())
    options = compiled(way.removesuffix(", compiled"), "cuda", limit, state, "eager")
    if way == "ours, compiled":
        options["options"]["host_limit"] = HOST_BYTES
    return torch.compile(model.loss, **options)


def train(way: str, name: str, limit: int | None, gpu: str, link: str) -> dict[str, Any]:
    """Train in this process; return the seconds and the peak bytes of the last step, and what was added."""
    import torch

    import mempool.torch
    from mempool.torch import compiled

    chosen = card(gpu)
    clock.start(rates_of(chosen.name, chosen.capability), parse_link(link))
    pool = None
    if way == "ours":
        options: dict[str, Any] = {"limit": limit, "host_limit": HOST_BYTES, "background": False}
        pool = mempool.torch.install(device="cuda", backend="pluggable", **options)
    make, size = own_process.models("cuda")[name.partition(",")[0]]
    model = make().cuda()
    model.checkpointing = way == "checkpoint"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loss_of = _loss(way, model, limit)
    batch = [part.cuda() for part in model.batch(0, size)]
    seconds, peak = 0.0, 0
    for _ in range(STEPS if pool is None else STEPS_OF_OURS):
        (torch.cuda.reset_peak_memory_stats if pool is None else pool.client.reset_peaks)()
        begin, hooks = clock.now(), _hooks(way)
        optimizer.zero_grad()
        with hooks, torch.autocast("cuda", torch.bfloat16, enabled=MODELS[name]):
            loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        loss.item()  # waits for the device
        if way == "offload":
            hooks.end_of_step()
        del loss
        seconds = clock.now() - begin
        peak = torch.cuda.max_memory_allocated() if pool is None else pool.client.stats()["live"]["peak"]
        if pool is not None:
            pool.plan_now()
    told: dict[str, Any] = {"seconds": seconds, "peak_bytes": peak}
    if pool is not None:
        told["added"] = pool.report().to_dict()["swapping"]["planned_stall_seconds"]
    elif way == "ours, compiled":
        graphs = compiled.report().graphs
        told["added"] = sum(graph["predicted_seconds"] - graph["plain_seconds"] for graph in graphs)
    return told


def compare(name: str, ways: list[str], gpu: str, link: str) -> None:
    """Print a line for each way of a model."""
    print(f"\n### {name}\n\n| way | limit GB | peak GB | of plain | ms a step | slower | predicted ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    plain: dict[str, Any] = {}

    def measure(label: str, way: str, limit: int | None = None) -> dict[str, Any]:
        try:
            row = in_child(train, way, name, limit, gpu, link)
        except SystemExit as error:
            lines = [line for line in str(error).splitlines() if "Error" in line] or [str(error)]
            print(f"| {label} | {lines[-1].strip()[:200]} |", flush=True)
            return {}
        base = plain or row
        cells = (
            label,
            "" if limit is None else f"{limit / 1e9:.2f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{row['peak_bytes'] / base['peak_bytes']:.1%}",
            f"{1e3 * row['seconds']:.1f}",
            f"{row['seconds'] / base['seconds'] - 1:+.1%}",
            "" if row.get("added") is None else f"{1e3 * (base['seconds'] + row['added']):.1f}",
        )
        print("|", " | ".join(cells), "|", flush=True)
        return row

    plain = measure("plain", "plain")
    peaks = {way: measure(way, way).get("peak_bytes") for way in PEERS if way in ways}
    limits = {f"in the peak of {way}": peak for way, peak in peaks.items() if peak and "pageable" not in way}
    limits |= {f"{share:.0%}": int(share * plain["peak_bytes"]) for share in SHARES}
    for label, limit in limits.items():
        for way in filter(ways.__contains__, OURS):
            measure(f"{way}, {label}", way, limit)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--card", default="H100")
    parser.add_argument("--link", default="pcie5")
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=[*PEERS, *OURS], default=[*PEERS, *OURS])
    options = parser.parse_args()
    with on_standin.loaded():
        import torch
        import torch._dynamo  # for all processes

        print(f"PyTorch {torch.__version__}, {options.card}, {options.link}")
        for name in options.only:
            compare(name, options.ways, options.card, options.link)


if __name__ == "__main__":
    main()
