"""Train on a GPU under one allocator; print the measurements as JSON.

python worker.py native|expandable|async|mempool|growing|guest WORKLOAD [BYTES]

Each workload is trained until a plan is in effect, and the last steps are timed. BYTES limits the memory that
the allocator holds (0: no limit). With BYTES the planner runs in its thread, as in a user's program, and the
output tells whether training has run out of memory.
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
    """Choose the allocator before CUDA is initialised, with a saved plan if given.

    Return the pool, or None.
    """
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
    """Limit the bytes that PyTorch's allocator holds; 0: no limit."""
    import torch

    if limit:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)


def alloc_and_free_ns() -> float:
    """Return the nanoseconds of an allocation and free of a 1 MiB tensor after many repetitions."""
    import torch

    torch.utils.deterministic.fill_uninitialized_memory = False  # otherwise the time of a kernel is measured
    for _ in range(4):
        begin = time.perf_counter_ns()
        for _ in range(20_000):
            torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        took = time.perf_counter_ns() - begin
        time.sleep(0.3)  # leaves time for the planner
    return took / 20_000


def training_step(workload: str, pool: Any) -> Callable[[int], torch.Tensor]:
    """Return a function that trains the step of a number and returns its loss.

    The pool watches the optimizer.
    """
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


def memory_and_losses(losses: list[torch.Tensor]) -> dict[str, Any]:
    """Return the peaks of live and reserved memory in this process, and a digest of the losses."""
    import torch

    text = ",".join(float(loss).hex() for loss in losses)
    return {
        "live_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "most_reserved_bytes": torch.cuda.max_memory_reserved(),
        "losses": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


def train(way: str, workload: str) -> dict[str, Any]:
    """Train; return the measurements of the timed steps."""
    pool = prepare(way)
    import torch
    from workloads import PERIODS

    steps, timed = PERIODS[workload]
    before = torch.cuda.mem_get_info()[0]
    step = training_step(workload, pool)
    losses: list[torch.Tensor] = []
    begin = 0.0
    outcomes: dict[str, int] = {}
    for number in range(steps):
        if number <= steps - timed:
            torch.cuda.synchronize()
            if pool is not None:
                pool.plan_now()  # the host might queue all steps before the planner's thread has a plan
                outcomes = pool.client.stats()["outcomes"]
            begin = time.perf_counter()
        losses.append(step(number))
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / timed
    used = before - torch.cuda.mem_get_info()[0]
    told = memory_and_losses(losses) | {
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


def train_within(way: str, workload: str, limit: int) -> dict[str, Any]:
    """Train within a limit in bytes (0: none); return the number of complete steps and the measurements."""
    pool = prepare(way)
    import torch
    from workloads import PERIODS

    keep_within(limit)
    losses: list[torch.Tensor] = []
    begin = time.perf_counter()
    try:
        step = training_step(workload, pool)
        losses.extend(step(number) for number in range(PERIODS[workload][0]))
    except torch.OutOfMemoryError as error:
        return {"steps": len(losses), "out_of_memory": str(error)[:300]}
    torch.cuda.synchronize()
    told = memory_and_losses(losses) | {
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
    sys.stdout.write(json.dumps(train_within(*chosen, *sizes) if sizes else train(*chosen)) + "\n")
