"""Swapping beside what people use today, on the same models: peak, seconds, losses.

    python tests/benchmarks/swapping_peers.py [--only MODEL ...] [--json FILE] [--shares-only]

Each run is a process of its own, with the pool, which counts the peak load. First come the peers, then ours
within the peak of each of them, if not told otherwise, and within shares of the plain peak. Of a step the
best time is told: the processor's, copies by other threads included, so that a busy machine does not count;
on CUDA the clock's.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import own_process

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch"))

if TYPE_CHECKING:
    from collections.abc import Callable

    from models import Model

PEERS = ("plain", "save_on_cpu", "offload", "checkpoint")
SHARES = (0.7, 0.5, 0.35)
STEPS, TIMED = 8, 4


def _models(device: str) -> dict[str, tuple[Callable[[], Model], int]]:
    """What makes each, and its batch."""
    from models import GPT, ResNet, UNet

    if device == "cpu":
        return {
            "ResNet-18": (ResNet, 48),
            "U-Net": (UNet, 48),
            "GPT": (lambda: GPT(192, 4), 24),
        }

    class Long(GPT):
        words, length = 50304, 1024

    class Large(ResNet):
        side = 128

    return {
        "ResNet-18": (lambda: Large(64), 256),
        "GPT-2": (lambda: Long(768, 12), 16),
    }


def train(way: str, name: str, device: str, limit: int | None) -> dict[str, Any]:
    """Train in this process; what it took."""
    import torch
    from offloading import LastKept, Stream, Thread, saved_on_host

    import mempool.torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    pool = mempool.torch.install(device=device, background=False, **({"limit": limit} if limit else {}))
    torch.manual_seed(0)
    make, size = _models(device)[name]
    model = make().to(device)
    model.checkpointing = way == "checkpoint"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
    hooks: Any = contextlib.nullcontext()
    if way == "save_on_cpu":
        hooks = saved_on_host(device)
    elif way == "offload":
        hooks = LastKept(Stream() if device == "cuda" else Thread())
    clock = time.perf_counter if device == "cuda" else time.process_time
    losses, seconds, peaks = [], [], []
    for step in range(STEPS):
        batch = [part.to(device) for part in model.batch(step, size)]
        pool.client.reset_peaks()
        begin = clock()
        optimizer.zero_grad()
        with hooks:
            loss = model.loss(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the device
        seconds.append(clock() - begin)
        peaks.append(pool.client.stats()["live"]["peak"])
        if way == "offload":
            hooks.end_of_step()
        del loss
        pool.step()
        pool.plan_now()
    told = {
        "seconds": min(seconds[-TIMED:]),
        "peak_bytes": max(peaks[-TIMED:]),
        "highest_bytes": max(peaks),
        "losses": hashlib.sha256(repr(losses).encode()).hexdigest()[:16],
        "reserved_bytes": pool.report().to_dict()["reserved_bytes"],
    }
    pool.close()
    return told


def compare(name: str, device: str, *, beside: bool = True) -> dict[str, dict[str, Any]]:
    """All ways of one model, ours `beside` each peer too; the table is printed as it grows."""
    own_process.print_head(name)
    rows: dict[str, dict[str, Any]] = {}

    def measure(label: str, way: str, limit: int | None = None) -> None:
        rows[label] = own_process.told(__file__, way, name, device, limit)
        own_process.print_row(rows, label, limit)

    for way in PEERS:
        measure(way, way)
    for way in PEERS[1:]:
        if beside and "error" not in rows[way]:
            measure(f"ours, in the peak of {way}", "ours", rows[way]["peak_bytes"])
    for share in SHARES:
        measure(f"ours, {share:.0%}", "ours", int(share * rows["plain"]["peak_bytes"]))
    return rows


def main(device: str, arguments: list[str] | None = None) -> dict[str, Any]:
    """Compare on this kind of device; the rows of each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shares-only", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.one:
        print(json.dumps(train(*json.loads(chosen.one))))
        return {}
    beside = not chosen.shares_only
    results = {name: compare(name, device, beside=beside) for name in chosen.only or _models(device)}
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main("cpu")
