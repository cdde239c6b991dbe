"""One workload on a GPU under one of CuPy's allocators, in a process of its own; prints figures as JSON.

python cupy_worker.py WAY WORKLOAD|alloc+free

The ways are those of `cupy_allocators.WAYS`, the workloads those of `cupy_workloads.WORKLOADS`. Code is
loaded and compiled before the measurement begins, with memory that goes straight back to the device.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from cupy_allocators import Allocator, SkippedError, serve
from cupy_workloads import WORKLOADS, Workload, budget_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "64 MiB": 1 << 26}
ALLOC_FREE = "alloc+free"
IDLE_ROUNDS = 6
WARM_UP_BYTES = 1 << 25


class Card(Protocol):
    """The GPU as somebody beside the allocator sees it."""

    def free_bytes(self) -> int:
        """Bytes that nobody holds."""

    def synchronize(self) -> None:
        """Wait for all that is queued."""


class Gpu:
    """The current device; what other processes do with its memory shows too."""

    def free_bytes(self) -> int:
        """As the driver says."""
        import cupy

        return int(cupy.cuda.runtime.memGetInfo()[0])

    def synchronize(self) -> None:
        """Wait for the device."""
        import cupy

        cupy.cuda.runtime.deviceSynchronize()


def measure(
    make: Callable[[], Workload], steps: int, timed: int, allocator: Allocator, card: Card
) -> dict[str, Any]:
    """Run a workload.

    Args:
        make: makes it.
        steps: in all.
        timed: the last ones.
        allocator: what serves it.
        card: the device.

    Returns:
        The median milliseconds of a timed step; bytes that the allocator says it holds at the end, bytes that
        somebody else sees gone then, and at most between steps; a hash of the results; what it says beside.
    """
    free = card.free_bytes()
    workload = make()
    most = 0
    for number in range(steps - timed):
        workload.step(number)
        allocator.step()
        most = max(most, free - card.free_bytes())
    allocator.wait()
    card.synchronize()
    took = []
    for number in range(steps - timed, steps):
        begin = time.perf_counter()
        workload.step(number)
        allocator.step()
        card.synchronize()
        took.append(time.perf_counter() - begin)
    used = free - card.free_bytes()
    return {
        "ms_per_step": 1e3 * median(took),
        "reserved_bytes": allocator.reserved_bytes(),
        "used_bytes": used,
        "used_peak_bytes": max(most, used),
        "result": workload.result(),
        **allocator.facts(),
    }


def alloc_and_free_ns(
    malloc: Callable[[int], object], allocator: Allocator, rounds: int = 12, times: int = 3000
) -> dict[str, float]:
    """Median nanoseconds for a buffer to come and go, by its size; the sizes take turns.

    Args:
        malloc: gives a buffer, which goes when it is dropped.
        allocator: what serves it.
        rounds: of which the first `IDLE_ROUNDS` do not count.
        times: of each size in each round.
    """
    took: dict[str, list[float]] = {name: [] for name in SIZES}
    for number in range(rounds):
        for name, size in SIZES.items():
            begin = time.perf_counter_ns()
            for _ in range(times):
                malloc(size)
            took[name].append((time.perf_counter_ns() - begin) / times)
        allocator.step()
        if number < IDLE_ROUNDS:
            allocator.wait()
    return {name: median(values[IDLE_ROUNDS:]) for name, values in took.items()}


def warm_up(name: str, xp: Any) -> None:
    """Two steps of a small one of its kind, for the code that they load."""
    small = WORKLOADS[name].make(xp, WARM_UP_BYTES)
    for number in range(2):
        small.step(number)
    small.result()


def main(way: str, name: str) -> dict[str, Any]:
    """Measure on the current device."""
    import cupy

    card = Gpu()
    if name != ALLOC_FREE:
        with cupy.cuda.using_allocator(None):
            warm_up(name, cupy)
        card.synchronize()
    free = card.free_bytes()
    # What may be taken in all: less than is free, and no more than a card of 24 GB has.
    most = min(20 << 30, int(0.8 * free)) // (1 << 21) * (1 << 21)
    try:
        allocator = serve(way, most)
    except SkippedError as error:
        return {"skipped": str(error)}
    if name == ALLOC_FREE:
        ns = alloc_and_free_ns(cupy.cuda.alloc, allocator)
        return {"ns": ns, **allocator.facts()}
    kind, budget = WORKLOADS[name], budget_bytes(free)
    told = measure(lambda: kind.make(cupy, budget), kind.steps, kind.timed, allocator, card)
    return told | {"budget_bytes": budget}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], sys.argv[2])) + "\n")
