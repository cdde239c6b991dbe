"""The loops of `tests/gpu`, recorded without a GPU and without memory, under simulated allocators.

    python tests/benchmarks/gpu_loops.py [--only LOOP ...] [--limits SHARE ...] [--json FILE]

What is held at most and in the last step, in GiB; and whether a loop comes to its end where so many times may
be held what is alive at most. `tests/gpu/compare.py` and `capacity.py` measure the same on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import numpy as np
import torch
import workloads

from mempool.recording.torch import AccessRecorder
from mempool.simulate import simulate
from mempool.torch.estimate.device.emulation import emulate_device
from mempool.torch.estimate.fake.isolation import isolated
from mempool.torch.estimate.fake.mode import fake_mode
from traces.trace import EventType

if TYPE_CHECKING:
    from traces.trace import Trace

GIB = 1 << 30
ALLOCATORS = ("pytorch", "pytorch_expandable", "planned_online", "planned_growing")
ROUNDED = 512  # bytes, as PyTorch asks for


def record(name: str) -> Trace:
    """As many steps as are run on a GPU; an H100's kernels."""
    steps, _ = workloads.PERIODS[name]
    with (
        isolated(),
        fake_mode(),
        emulate_device("cuda", capability=(9, 0)),
        mock.patch.object(workloads, "_random", return_value=None),
    ):
        with torch.device("cuda"):
            model, loss_of = workloads.WORKLOADS[name]()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        with AccessRecorder([model], [optimizer]) as recorder:
            for number in range(steps):
                optimizer.zero_grad()
                loss_of(model, number).backward()
                optimizer.step()
                recorder.step()
    trace = recorder.trace()
    return dataclasses.replace(trace, size=-(-trace.size // ROUNDED) * ROUNDED)


def row(trace: Trace, allocator: str, limits: list[float]) -> dict[str, Any]:
    """What one allocator makes of it."""
    free, peak = simulate(trace, allocator), int(trace.load().max())
    ends = np.flatnonzero((trace.kind == EventType.MARK) & (trace.operation == trace.names.index("step")))
    fits = {}
    for share in limits:
        failed_at = simulate(trace, allocator, limit_bytes=int(share * peak)).failed_at
        fits[f"{share:g}"] = None if failed_at is None else int(np.searchsorted(ends, failed_at)) + 1
    last = int(free.reserved[ends[-2] :].max())
    return {"most_bytes": free.peak_reserved_bytes, "last_bytes": last, "out_of_memory_in_step": fits}


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=workloads.WORKLOADS, default=list(workloads.WORKLOADS))
    parser.add_argument("--limits", nargs="*", type=float, default=[1.03, 1.1, 1.25])
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    names = [
        "loop",
        "live",
        "allocator",
        "most",
        "last step",
        *(f"{share:g} times" for share in chosen.limits),
    ]
    print("|", " | ".join(names), "|")
    print("|", " | ".join("---" for _ in names), "|")
    results: dict[str, dict[str, Any]] = {}
    for name in chosen.only:
        trace = record(name)
        live = int(trace.load().max())
        results[name] = {}
        for allocator in ALLOCATORS:
            results[name][allocator] = made = row(trace, allocator, chosen.limits)
            ends = [
                "fits" if step is None else f"step {step}" for step in made["out_of_memory_in_step"].values()
            ]
            sizes = [f"{made[key] / GIB:.2f}" for key in ("most_bytes", "last_bytes")]
            print("|", " | ".join([name, f"{live / GIB:.2f}", allocator, *sizes, *ends]), "|", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
