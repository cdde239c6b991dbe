"""One training run on a GPU under one allocator, in a process of its own; prints what it measured as JSON.

python worker.py native|expandable|async|mempool|growing WORKLOAD

Each workload is trained for so many of its periods that a plan is in effect, and its last ones are timed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

MEMORIES = {"mempool": "plain", "growing": "growing"}
CONFIGURATIONS = {"expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}


def prepare(way: str) -> Any:
    """Choose the allocator before CUDA is in use; the pool, or None."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if way in CONFIGURATIONS:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = CONFIGURATIONS[way]
    import torch

    torch.use_deterministic_algorithms(True)
    if way not in MEMORIES:
        return None
    import mempool.torch

    return mempool.torch.install(device="cuda", memory=MEMORIES[way])


def alloc_and_free_ns() -> float:
    """Nanoseconds for a tensor of 1 MiB to come and go, once that has been going on for long."""
    import torch

    for _ in range(4):
        begin = time.perf_counter_ns()
        for _ in range(20_000):
            torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        took = time.perf_counter_ns() - begin
        time.sleep(0.3)  # for whoever plans
    return took / 20_000


def train(way: str, workload: str) -> dict[str, Any]:
    """Train; what it took."""
    pool = prepare(way)
    import torch
    from workloads import PERIODS, WORKLOADS

    steps, timed = PERIODS[workload]
    before = torch.cuda.mem_get_info()[0]
    torch.manual_seed(0)
    model, loss_of = WORKLOADS[workload]()
    model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    if pool is not None:
        pool.watch(optimizer)
    losses: list[torch.Tensor] = []
    begin = 0.0
    for number in range(steps):
        if number <= steps - timed:
            torch.cuda.synchronize()
            if pool is not None:
                pool.plan_now()  # the host may have asked for all steps before a thread has a plan
            begin = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / timed
    used = before - torch.cuda.mem_get_info()[0]
    text = ",".join(float(loss).hex() for loss in losses)
    told = {
        "steps_per_second": 1 / seconds,
        "live_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "most_reserved_bytes": torch.cuda.max_memory_reserved(),
        "used_bytes": used,
        "losses": hashlib.sha256(text.encode()).hexdigest()[:16],
        "alloc_free_ns": alloc_and_free_ns(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    if pool is not None:
        report = pool.report().to_dict()
        told |= {key: report[key] for key in ("hit_rate", "coverage", "plans") if key in report}
    return told


if __name__ == "__main__":
    sys.stdout.write(json.dumps(train(sys.argv[1], sys.argv[2])) + "\n")
