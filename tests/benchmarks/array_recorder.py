"""What recording costs an operation on small arrays of NumPy, in microseconds of processor time.

    python tests/benchmarks/array_recorder.py

The best of several runs, plain and recorded ones in turn.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mempool.recording.arrays import ArrayRecorder

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "a + b": lambda a, b: a + b,
    "a += b": lambda a, b: a.__iadd__(b),
    "a[1:] (a view)": lambda a, _: a[1:],
    "a[i] = 1": lambda a, _: a.__setitem__(1, 1),
    "a.sum()": lambda a, _: a.sum(),
    "np.concatenate([a, b])": lambda a, b: np.concatenate([a, b]),
    "np.where(a, a, b)": lambda a, b: np.where(a, a, b),
}
CALLS, RUNS = 2000, 7


def microseconds(call: Callable[[Any, Any], Any], one: Any, other: Any) -> float:
    """Of one call."""
    gc.collect()
    begin = time.process_time_ns()
    for _ in range(CALLS):
        call(one, other)
    return (time.process_time_ns() - begin) / CALLS / 1e3


def main() -> None:
    """Print a table."""
    print(f"{'operation':26}{'plain':>8}{'recorded':>10}{'with lines':>12}")
    for name, call in OPERATIONS.items():
        best = [float("inf")] * 3
        for _ in range(RUNS):
            one, other = np.ones(16), np.ones(16)
            best[0] = min(best[0], microseconds(call, one, other))
            for at, frames in ((1, False), (2, True)):
                with ArrayRecorder(frames=frames) as recorder:
                    watched = recorder.watch([one, other])
                    best[at] = min(best[at], microseconds(call, *watched))
        print(f"{name:26}{best[0]:8.2f}{best[1]:10.2f}{best[2]:12.2f}")


if __name__ == "__main__":
    main()
