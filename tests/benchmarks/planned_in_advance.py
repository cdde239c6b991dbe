"""Most memory held and smallest sufficient limit of the loops of `tests/gpu`, with and without a saved plan.

    python tests/benchmarks/planned_in_advance.py [--loops LOOP ...] [--ways WAY ...] [--limits]

Needs a CUDA build of PyTorch, and no GPU: the loops run on the stand-in. The table has multiples of the peak
live bytes: most reserved bytes without a limit, reserved bytes at the end, and with ``--limits`` the smallest
limit at which training ends, found by bisection to 0.002. ``mapped`` and ``unmapped`` count calls for pages
of address space, in all steps and in the second half of the steps. ``mempool`` is the pool on plain
memory; ``guest`` is the pool in front of PyTorch's allocator with expandable segments, ``guest plain``
without; ``saved`` replays the plan that an earlier run of the same loop saved.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path
from typing import Any

import on_standin
from on_standin import in_child

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

GIB = 1 << 30
LOOPS = ("gpt", "cnn", "lengths", "any length")
WAYS = (
    "native", "expandable", "mempool", "growing", "guest", "guest plain",
    "mempool, saved", "growing, saved", "guest, saved", "guest plain, saved",
)  # fmt: skip
ACCURACY = 0.002  #: of the smallest limit, as a multiple of the peak live bytes


def train(way: str, loop: str, limit: int, plan: str | None, save: str | None) -> dict[str, Any]:
    """Train one loop in this process; return the measured bytes, and whether training ran out of memory."""
    import torch
    import worker
    from workloads import PERIODS

    pool = worker.prepare(way.partition(",")[0], plan)
    worker.keep_within(limit)
    failed, steps, half = False, PERIODS[loop][0], (0, 0)
    try:
        step = worker.training_step(loop, pool)
        for number in range(steps):
            if number == steps // 2:
                half = page_calls()
            if pool is not None:
                pool.plan_now()  # steps take no time here: a thread would plan late
            step(number)
    except torch.OutOfMemoryError:
        failed = True
    if pool is not None and save is not None:
        pool.save(save)
    return {
        "failed": failed,
        # PyTorch's own peak counts the guest's arena as a whole
        "live": pool.client.stats()["live"]["peak"] if "guest" in way else torch.cuda.max_memory_allocated(),
        "most": torch.cuda.max_memory_reserved(),
        "end": torch.cuda.memory_reserved(),
        "pages": [(total, total - before) for total, before in zip(page_calls(), half, strict=True)],
    }


def page_calls() -> tuple[int, int]:
    """Return the calls of the stand-in so far that mapped and unmapped pages."""
    driver = ctypes.CDLL("libcuda.so.1")
    return driver.fake_calls(b"cuMemMap"), driver.fake_calls(b"cuMemUnmap")


def smallest_limit(way: str, loop: str, live: int, most: int, plan: str | None) -> float:
    """Return the smallest limit at which training ends, as a multiple of the peak live bytes."""
    low, high = 1.0, max(most / live, 1 + ACCURACY)
    while high - low > ACCURACY:
        middle = (low + high) / 2
        if in_child(train, way, loop, int(middle * live), plan, None)["failed"]:
            low = middle
        else:
            high = middle
    return high


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--loops", nargs="*", choices=LOOPS, default=LOOPS)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--limits", action="store_true")
    chosen = parser.parse_args()
    with on_standin.loaded() as folder:
        import torch  # noqa: F401 - for all children
        import worker  # noqa: F401

        import mempool.torch  # noqa: F401

        print("| loop | allocator | live, GiB | most held | at the end | limit | mapped | unmapped |")
        print("| --- | ---" + " | ---:" * 6 + " |")
        for loop in chosen.loops:
            for way in chosen.ways:
                plan = None
                if "saved" in way:
                    plan = str(folder / f"{loop}.{way}.plan")
                    in_child(train, way.partition(",")[0], loop, 0, None, plan)
                free = in_child(train, way, loop, 0, plan, None)
                live, most = free["live"], free["most"]
                limit = f"{smallest_limit(way, loop, live, most, plan):.3f}" if chosen.limits else ""
                row = [
                    loop,
                    way,
                    f"{live / GIB:.2f}",
                    f"{most / live:.4f}",
                    f"{free['end'] / live:.4f}",
                    limit,
                    *(f"{total:,}, {late:,}" for total, late in free["pages"]),
                ]
                print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
