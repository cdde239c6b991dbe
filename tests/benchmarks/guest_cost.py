"""Host time of the guest beside PyTorch's allocator alone: an allocation with its free, and a training step.

    python tests/benchmarks/guest_cost.py [--rounds 7]

Needs a CUDA build of PyTorch and a C++20 compiler, and no GPU: the programs run on the stand-in. A loop in
C++ makes and frees tensors' memory, eight live at a time. Each run is a process of its own, in which a
figure is the median over 2000 iterations of 200 requests after a thousand that are slower in any
process; the ways take turns. A miss comes behind the last planned request of an iteration, and is larger
than the arena, whose holes would serve smaller misses. The table has the median over the rounds, and the
medians of the ratio and of the difference to PyTorch's allocator for the same sizes in the same round.
The second table has the processor time of a step, the least of a hundred, in milliseconds.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import offload_host_time
import on_standin
from on_standin import in_child

SOURCE = """
#include <c10/cuda/CUDACachingAllocator.h>
#include <chrono>
#include <vector>
extern "C" double guest_cost(const size_t* sizes, int count) {
  c10::cuda::CUDACachingAllocator::CUDAAllocator* const allocator = c10::cuda::CUDACachingAllocator::get();
  std::vector<c10::DataPtr> live(8);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) live[i % 8] = allocator->allocate(sizes[i]);
  for (c10::DataPtr& tensor : live) tensor.clear();
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
  return time.count() / count;
}
"""
#: Settings of PyTorch's allocator in all runs: those that the guest makes.
SETTINGS = "expandable_segments:True,large_segment_size_mb:12"
#: SLOW: iterations at the beginning of a process that are left out.
REQUESTS, WARM, SLOW, ITERATIONS, STEPS = 200, 20, 1000, 3000, 100
PLANNED = [(i % 37 + 1) * 1024 for i in range(REQUESTS)]  #: bytes
UNPLANNED = [(i % 37 + 40) * 8192 for i in range(REQUESTS)]  #: of a pool of PyTorch's, as the planned ones
SMALL = [i % 8 * 64 + 8 for i in range(REQUESTS)]  #: no plan ever has them
NATIVE = "PyTorch's allocator"
#: Sizes of the measured requests, and the way that they are compared with, by way.
WAYS = {
    NATIVE: (PLANNED, NATIVE),
    "hit": (PLANNED, NATIVE),
    "hit, recorded": (PLANNED, NATIVE),
    "without a plan, recorded": (PLANNED, NATIVE),
    "after the pool is closed": (PLANNED, NATIVE),
    f"{NATIVE}, larger": (UNPLANNED, f"{NATIVE}, larger"),
    "miss": (UNPLANNED, f"{NATIVE}, larger"),
    "miss, recorded": (UNPLANNED, f"{NATIVE}, larger"),
    f"{NATIVE}, small": (SMALL, f"{NATIVE}, small"),
    "small": (SMALL, f"{NATIVE}, small"),
}


def measure(way: str, source: str) -> dict[str, Any]:
    """Return the nanoseconds of an allocation and its free, and the share of each outcome."""
    import torch

    import mempool.torch
    from mempool.torch.compiled_library import Source

    cost = Source(Path(source), ("c10", "c10_cuda"), "guest_cost", needs_cuda=True).load().guest_cost
    cost.restype = ctypes.c_double
    planned, measured = ((ctypes.c_size_t * REQUESTS)(*sizes) for sizes in (PLANNED, WAYS[way][0]))
    torch.cuda.init()
    gc.disable()
    if way.startswith(NATIVE):
        before = planned if "larger" in way else measured
        alone = [(cost(before, REQUESTS), cost(measured, REQUESTS))[1] for _ in range(ITERATIONS)]
        return {"ns": statistics.median(alone[SLOW:]), "outcomes": {}}
    pool = mempool.torch.install(device="cuda", backend="guest", background=False)
    for _ in range(WARM):
        pool.step()
        cost(planned, REQUESTS)
        if "without a plan" not in way:
            pool.plan_now()
    if "recorded" not in way:
        pool.client.set_recording(False)
    if "closed" in way:
        pool.close()
    times, before = [], pool.client.stats()["outcomes"]
    for _ in range(ITERATIONS):
        if "closed" not in way:
            pool.step()
        if "miss" in way:
            cost(planned, REQUESTS)
        times.append(cost(measured, REQUESTS))
    after = pool.client.stats()["outcomes"]
    counts = {name: after[name] - before[name] for name in after}
    return {
        "ns": statistics.median(times[SLOW:]),
        "outcomes": {k: n / ITERATIONS / REQUESTS for k, n in counts.items() if n != 0},
    }


def compare(rows: list[dict[str, Any]]) -> None:
    """Print the table of allocations."""
    print("| | ns | ratio | more, ns | outcomes |\n| --- | --: | --: | --: | --- |")
    for way, (_, alone) in WAYS.items():
        times = [(row[way]["ns"], row[alone]["ns"]) for row in rows]
        figures = [
            statistics.median(time for time, _ in times),
            statistics.median(time / native for time, native in times),
            statistics.median(time - native for time, native in times),
        ]
        outcomes = ", ".join(f"{name} {share:.2f}" for name, share in rows[0][way]["outcomes"].items())
        print("| {} | {:.0f} | {:.2f} | {:.0f} | {} |".format(way, *figures, outcomes))


def small_operations() -> Callable[[], None]:
    """Return the training step of 300 small layers, some 2,000 operations."""
    import torch
    from torch import nn

    layers = (layer for _ in range(300) for layer in (nn.Linear(64, 64), nn.Tanh()))
    model = nn.Sequential(*layers).cuda()
    optimizer, batch = torch.optim.SGD(model.parameters(), 0.1), torch.ones(64, 64, device="cuda")

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


PROGRAMS = {"small operations": small_operations, **offload_host_time.PROGRAMS}


def step_time(guest: bool, program: str) -> dict[str, Any]:
    """Return the least milliseconds of processor time of a step, and the share of hits."""
    import mempool.torch

    pool = mempool.torch.install(device="cuda", backend="guest", background=False) if guest else None
    step, times, hits = PROGRAMS[program](), [], 0
    for number in range(WARM + STEPS):
        if pool is not None and number <= WARM:
            pool.plan_now()
        if pool is not None and number == WARM:
            pool.client.set_recording(False)
            before = pool.client.stats()["outcomes"]
        begin = time.process_time()
        step()
        times.append(1e3 * (time.process_time() - begin))
    if pool is not None:
        counts = {name: count - before[name] for name, count in pool.client.stats()["outcomes"].items()}
        hits = counts["hit"] / sum(counts.values())
    return {"ms": min(times[WARM:]), "hits": hits}


def compare_steps(rounds: int) -> None:
    """Print the table of steps."""
    print("\n| step | PyTorch's allocator | guest | ratio | hits |\n| --- | --: | --: | --: | --: |")
    for program in PROGRAMS:
        pairs = [[in_child(step_time, guest, program) for guest in (False, True)] for _ in range(rounds)]
        alone, guest = (statistics.median(pair[i]["ms"] for pair in pairs) for i in range(2))
        ratio = statistics.median(pair[1]["ms"] / pair[0]["ms"] for pair in pairs)
        print(f"| {program} | {alone:.2f} | {guest:.2f} | {ratio:.3f} | {pairs[0][1]['hits']:.3f} |")


def main() -> None:
    """Print the tables of `__doc__`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    os.environ["PYTORCH_ALLOC_CONF"] = SETTINGS
    with on_standin.loaded() as folder:
        import mempool.torch  # noqa: F401  (the children have it)

        (source := folder / "guest_cost.cpp").write_text(SOURCE)
        rows = [{way: in_child(measure, way, str(source)) for way in WAYS} for _ in range(rounds)]
        compare(rows)
        compare_steps(rounds)


if __name__ == "__main__":
    main()
