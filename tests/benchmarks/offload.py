"""Time of a step and peak memory of PyTorch's offloading and of this project's, on a modelled GPU.

    python tests/benchmarks/offload.py [--card H100] [--link pcie5] [--only MODEL ...] [--ways WAY ...]
    python tests/benchmarks/offload.py --loops

Needs a CUDA build of PyTorch and a C++ compiler, and no GPU: each run is a process on the stand-in, whose
kernels take the roofline's time of the card and whose copies take the link's (`mempool.rehearsal.clock`). The
host takes no time. The peers run first, then this project's pool within the peak of each peer and within
fractions of the plain peak. *Predicted* is the step time without a limit plus the stall of the plan. Compiled
graphs run operation by operation, as the stand-in has no compiler. A failed run prints its error. The second
form prints the step times of the loops of `tests/gpu`, compared with an H100's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
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

PEERS = ("save_on_cpu", "offload", "checkpoint", "budget 0.5", "budget 0.1")
UNMATCHED = ("compiled", "save_on_cpu, pageable")  #: methods with the same peak as another method
OURS = ("ours", "ours, compiled")
SHARES = (0.8, 0.6, 0.4)
HOST_BYTES = 256 << 30  #: address space for copies; nothing is written to it
STEPS, STEPS_OF_OURS = 4, 16  #: steps of a run, of which the last is told; ours with all plans made
#: Milliseconds of a step on an H100 (`tests/gpu/compare.py`, 2026-11-27), and different steps of a loop.
LOOPS = {"gpt": (64.2, 1), "lengths": (40.2, 13), "cnn": (141.4, 1)}
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
    from rewriting_peers import compile_arguments

    if way not in ("compiled", "ours, compiled") and not way.startswith("budget"):
        return model.loss
    state = 2 * sum(one.nbytes for one in model.parameters())
    options = compile_arguments(way.removesuffix(", compiled"), "cuda", limit, state, "eager")
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


def train_loop(loop: str) -> dict[str, Any]:
    """Train a loop of `tests/gpu` on the modelled H100; return the milliseconds of a step."""
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
    from workloads import WORKLOADS

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)  # as on the H100
    clock.start(rates_of("H100", card("H100").capability), parse_link("pcie5"))
    model, loss_of = WORKLOADS[loop]()
    model.cuda()
    optimizer, (_, steps), begin = torch.optim.AdamW(model.parameters()), LOOPS[loop], 0.0
    for number in range(2 * steps):
        if number == steps:
            torch.cuda.synchronize()
            begin = clock.now()
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
    torch.cuda.synchronize()
    return {"ms": 1e3 * (clock.now() - begin) / steps}


def compare(name: str, ways: list[str], gpu: str, link: str) -> None:
    """Print a line for each way of a model."""
    print(f"\n### {name}\n\n| way | limit GB | peak GB | of plain | ms a step | slower | predicted ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    rows: dict[str, dict[str, Any]] = {}

    def measure(label: str, way: str, limit: int | None = None) -> None:
        try:
            row = in_child(train, way, name, limit, gpu, link)
        except SystemExit as error:
            lines = [line for line in str(error).splitlines() if "Error" in line] or [str(error)]
            print(f"| {label} | {lines[-1].strip()[:200]} |", flush=True)
            return
        rows[label], plain = row, rows.get("plain", row)
        unlimited = rows.get("compiled", plain) if way == "ours, compiled" else plain
        cells = (
            label,
            "" if limit is None else f"{limit / 1e9:.2f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{row['peak_bytes'] / plain['peak_bytes']:.1%}",
            f"{1e3 * row['seconds']:.1f}",
            f"{row['seconds'] / plain['seconds'] - 1:+.1%}",
            "" if row.get("added") is None else f"{1e3 * (unlimited['seconds'] + row['added']):.1f}",
        )
        print("|", " | ".join(cells), "|", flush=True)

    for way in ("plain", *filter(ways.__contains__, (*UNMATCHED, *PEERS))):
        measure(way, way)
    limits = {f"in the peak of {way}": rows[way]["peak_bytes"] for way in PEERS if way in rows}
    limits |= {f"{share:.0%}": int(share * rows["plain"]["peak_bytes"]) for share in SHARES}
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
    parser.add_argument("--loops", action="store_true")
    ways = [*UNMATCHED, *PEERS, *OURS]
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    options = parser.parse_args()
    with on_standin.loaded():
        import torch
        import torch._dynamo  # for all processes

        print(f"PyTorch {torch.__version__}, {options.card}, {options.link}")
        for loop, (measured, _) in LOOPS.items() if options.loops else ():
            print(f"{loop}: {in_child(train_loop, loop)['ms']:.1f} ms, on an H100 {measured}")
        if options.loops:
            return
        for name in options.only:
            compare(name, options.ways, options.card, options.link)


if __name__ == "__main__":
    main()
