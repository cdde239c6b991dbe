"""One training run on a GPU under one allocator, in a process of its own; prints what it measured as JSON.

python worker.py native|expandable|async|mempool|growing|guest WORKLOAD [BYTES]

Each workload is trained for so many of its periods that a plan is in effect, and its last ones are timed.
With BYTES the allocator may hold that much, 0 for as much as there is, and what is told is whether training
came to its end, as a user's does: planned by the thread, while the host runs ahead.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

MEMORIES = {"mempool": "plain", "growing": "growing"}
CONFIGURATIONS = {
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
    "guest plain": "expandable_segments:False",
}
GUESTS = ("guest", "guest plain")


def prepare(way: str, plan: str | None = None) -> Any:
    """Choose the allocator before CUDA is in use, with a saved plan; return the pool, or None."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if way in CONFIGURATIONS:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = CONFIGURATIONS[way]
    import torch

    torch.use_deterministic_algorithms(True)
    if way not in (*MEMORIES, *GUESTS):
        return None
    import mempool.torch

    if way in GUESTS:
        return mempool.torch.install(device="cuda", backend="guest", plan=plan)
    return mempool.torch.install(device="cuda", memory=MEMORIES[way], plan=plan)


def keep_within(limit: int) -> None:
    """Let PyTorch's allocator hold no more than these bytes; 0: as much as there is."""
    import torch

    if limit:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)


def alloc_and_free_ns() -> float:
    """Nanoseconds for a tensor of 1 MiB to come and go, once that has been going on for long."""
    import torch

    torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel for each would be what is timed
    for _ in range(4):
        begin = time.perf_counter_ns()
        for _ in range(20_000):
            torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        took = time.perf_counter_ns() - begin
        time.sleep(0.3)  # for whoever plans
    return took / 20_000


def stepping(workload: str, pool: Any) -> Callable[[int], torch.Tensor]:
    """What trains a step by its number and returns its loss; the optimizer's steps mark iterations."""
    import torch
    from workloads import WORKLOADS

    torch.manual_seed(0)
    model, loss_of = WORKLOADS[workload]()
    model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    if pool is not None:
        pool.watch(optimizer)

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def held_and_lost(losses: list[torch.Tensor]) -> dict[str, Any]:
    """What was alive and held in this process so far; and losses, the same if they are so to the bit."""
    import torch

    text = ",".join(float(loss).hex() for loss in losses)
    return {
        "live_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "most_reserved_bytes": torch.cuda.max_memory_reserved(),
        "losses": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


def train(way: str, workload: str) -> dict[str, Any]:
    """Train; what it took."""
    pool = prepare(way)
    import torch
    from workloads import PERIODS

    steps, timed = PERIODS[workload]
    before = torch.cuda.mem_get_info()[0]
    step = stepping(workload, pool)
    losses: list[torch.Tensor] = []
    begin = 0.0
    outcomes: dict[str, int] = {}
    for number in range(steps):
        if number <= steps - timed:
            torch.cuda.synchronize()
            if pool is not None:
                pool.plan_now()  # the host may have asked for all steps before a thread has a plan
                outcomes = pool.client.stats()["outcomes"]
            begin = time.perf_counter()
        losses.append(step(number))
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / timed
    used = before - torch.cuda.mem_get_info()[0]
    told = held_and_lost(losses) | {
        "steps_per_second": 1 / seconds,
        "used_bytes": used,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    if pool is not None:
        now = pool.client.stats()["outcomes"]
        asked = {name: now[name] - outcomes[name] for name in now if now[name] != outcomes[name]}
        told |= {
            "outcomes": asked,
            "hit_rate": asked.get("hit", 0) / sum(asked.values()),
            "plans": pool.plans,
        }
    return told | {"alloc_free_ns": alloc_and_free_ns()}


def within(way: str, workload: str, limit: int) -> dict[str, Any]:
    """Train with no more than these bytes held, if they are not 0; where it ended, and what was held."""
    pool = prepare(way)
    import torch
    from workloads import PERIODS

    keep_within(limit)
    losses: list[torch.Tensor] = []
    begin = time.perf_counter()
    try:
        step = stepping(workload, pool)
        losses.extend(step(number) for number in range(PERIODS[workload][0]))
    except torch.OutOfMemoryError as error:
        return {"steps": len(losses), "out_of_memory": str(error)[:300]}
    torch.cuda.synchronize()
    told = held_and_lost(losses) | {
        "steps": len(losses),
        "seconds": time.perf_counter() - begin,
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
    }
    if pool is not None:
        report = pool.report().to_dict()
        told |= {key: report[key] for key in ("hit_rate", "coverage", "plans") if key in report}
    return told


if __name__ == "__main__":
    chosen, sizes = sys.argv[1:3], [int(size) for size in sys.argv[3:]]
    sys.stdout.write(json.dumps(within(*chosen, *sizes) if sizes else train(*chosen)) + "\n")
