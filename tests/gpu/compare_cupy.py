"""CuPy's allocators and the pool on this machine's GPU: what must hold, then one table a workload.

    python tests/gpu/compare_cupy.py [--json FILE]

Under ten minutes. Without a GPU or without CuPy it says so and ends with 0. "Live" is the most that a
program has alive at once; "reserved" is what an allocator says it holds, "used" what the driver misses then,
and "most" what it missed at most between steps. Others that use the GPU meanwhile show in these two. RMM's
arena takes all that it may have at once.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runs import GIB, SECONDS, finish, row_of, show, told, why_not

ALLOC_FREE = "alloc+free"
WAYS = (
    "cupy",
    "async",
    "rmm pool",
    "rmm arena",
    "mempool",
    "mempool growing",
    "mempool managed",
)
NAMES = ("training", "small training", "solver", "random allocations", "generated trace", "recorded GPT")
CHECKS = (
    "zero_bytes",
    "streams",
    "out_of_memory",
    "two_devices",
    "growing_gives_back",
    "managed_beyond_plain",
)
COLUMNS = (
    "allocator",
    "ms a step",
    "live GiB",
    "reserved GiB",
    "used GiB",
    "most GiB",
    "stranded",
    "hit rate",
    "result",
)
IN_ALL_SECONDS = 580


class Clock:
    """Ten minutes for all."""

    def __init__(self) -> None:
        self._end = time.monotonic() + IN_ALL_SECONDS

    def told(self, script: str, *arguments: str) -> tuple[str, str]:
        """As `runs.told`, in what is left of the time."""
        left = self._end - time.monotonic()
        if left < 5:
            return "", "not run: the time is over"
        return told(script, *arguments, seconds=min(SECONDS, left))

    def row(self, way: str, name: str) -> dict[str, Any]:
        """What a worker measured, or an error, or why it was skipped."""
        return row_of(*self.told("cupy_worker.py", way, name))


def cells(row: dict[str, Any], live_bytes: int | None) -> list[str]:
    """One allocator's line of a workload's table."""
    if (why := _sentence(row)) is not None:
        return [why]
    reserved, used, most = (row[f"{key}_bytes"] for key in ("reserved", "used", "used_peak"))
    return [
        f"{row['ms_per_step']:.2f}",
        "-" if live_bytes is None else f"{live_bytes / GIB:.2f}",
        *(f"{size / GIB:.2f}" for size in (reserved, used, most)),
        f"{1 - live_bytes / reserved:.1%}" if live_bytes and reserved else "-",
        _hit_rate(row),
        row["result"],
    ]


def ns_cells(row: dict[str, Any]) -> list[str]:
    """One allocator's line of the table of alloc + free."""
    if (why := _sentence(row)) is not None:
        return [why]
    return [*(f"{ns:.0f}" for ns in row["ns"].values()), _hit_rate(row)]


def _sentence(row: dict[str, Any]) -> str | None:
    return row["error"] if "error" in row else f"skipped: {row['skipped']}" if "skipped" in row else None


def _hit_rate(row: dict[str, Any]) -> str:
    return f"{row['hit_rate']:.3f}" if row.get("hit_rate") is not None else "-"


def machine() -> dict[str, str]:
    """What the figures are of."""
    import cupy

    runtime = cupy.cuda.runtime
    gpu = runtime.getDeviceProperties(runtime.getDevice())
    driver = runtime.driverGetVersion()
    return {
        "gpu": gpu["name"].decode(),
        "memory": f"{gpu['totalGlobalMem'] / GIB:.0f} GiB",
        "CUDA of the driver": f"{driver // 1000}.{driver % 1000 // 10}",
        "CuPy": cupy.__version__,
        "Python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def faults(name: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    """What is wrong with a workload's rows."""
    wrong = [f"{name}: {way}: {row['error']}" for way, row in rows.items() if "error" in row]
    results = {row["result"] for row in rows.values() if "result" in row}
    return wrong + ([f"{name}: the results differ"] if len(results) > 1 else [])


def main() -> int:
    """Run everything; 1 if results differ or something does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if (reason := why_not("cupy")) is not None:
        sys.stdout.write(f"nothing to compare: {reason}\n")
        return 0
    clock, wrong = Clock(), []
    results: dict[str, Any] = {"machine": machine()}
    sys.stdout.write(", ".join(f"{key} {value}" for key, value in results["machine"].items()) + "\n")
    results["checks"] = {}
    for check in CHECKS:
        line, error = clock.told("cupy_checks.py", check)
        results["checks"][check] = error or line
        sys.stdout.write(f"{check}: {error or line}\n")
        wrong += [f"{check}: {error}"] if error else []
    rows = {way: clock.row(way, ALLOC_FREE) for way in WAYS}
    show(
        "alloc + free, ns",
        ("allocator", *_sizes(rows), "hit rate"),
        {way: ns_cells(row) for way, row in rows.items()},
    )
    wrong += faults(ALLOC_FREE, rows)
    results[ALLOC_FREE] = rows
    for name in NAMES:
        rows = {way: clock.row(way, name) for way in ("load", *WAYS)}
        live = rows["load"].get("reserved_bytes")
        show(name, COLUMNS, {way: cells(rows[way], live) for way in WAYS})
        wrong += faults(name, rows)
        results[name] = rows
    return finish(results, wrong, chosen.json)


def _sizes(rows: dict[str, dict[str, Any]]) -> list[str]:
    return next((list(row["ns"]) for row in rows.values() if "ns" in row), [])


if __name__ == "__main__":
    sys.exit(main())
