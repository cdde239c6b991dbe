"""PyTorch's allocators and the pool on this machine's GPU: one table for each workload, then the checks.

    python tests/gpu/compare.py [--json FILE] [--only WORKLOAD ...] [--ways ALLOCATOR ...] [--no-checks]

The pool runs with plain and with growing memory. The script takes under ten minutes. The exit status is 0
without a GPU, and 1 if losses differ or a check fails. "Live" is the peak of live memory, "reserved" the
memory that an allocator holds at the end, "most" the peak of reserved memory, "used" the decrease of the
driver's free memory. The hit rate is that of the timed steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from runs import GIB, failures_of, finish, gpu_unavailable_reason, row_of, run_script, show

WAYS = ("native", "expandable", "async", "mempool", "growing")
NAMES = ("cnn", "gpt", "lengths", "any length")
CHECKS = (
    "record_stream", "graphs", "autograd_threads", "out_of_memory", "statistics", "snapshots", "limits",
    "loader", "nccl", "planned", "background",
)  # fmt: skip
COLUMNS = (
    "allocator",
    "steps/s",
    "live GiB",
    "reserved GiB",
    "most GiB",
    "used GiB",
    "stranded",
    "alloc+free ns",
    "hit rate",
    "losses",
)


def cells(row: dict[str, Any]) -> list[str]:
    """Return the table cells of an allocator."""
    if "error" in row:
        return [row["error"]]
    keys = ("live", "reserved", "most_reserved", "used")
    live, reserved, most, used = (row[f"{key}_bytes"] / GIB for key in keys)
    stranded = f"{1 - live / reserved:.1%}" if reserved else "-"
    hits = f"{row['hit_rate']:.3f}" if row.get("hit_rate") is not None else "-"
    return [
        f"{row['steps_per_second']:.2f}", f"{live:.2f}", f"{reserved:.2f}", f"{most:.2f}", f"{used:.2f}",
        stranded, f"{row['alloc_free_ns']:.0f}", hits, row["losses"],
    ]  # fmt: skip


def main() -> int:
    """Run workloads and checks; return 1 if losses differ or a check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--checks", action=argparse.BooleanOptionalAction, default=True)
    chosen = parser.parse_args()
    if (reason := gpu_unavailable_reason("torch")) is not None:
        sys.stdout.write(f"nothing to compare: {reason}\n")
        return 0
    results: dict[str, Any] = {}
    wrong: list[str] = []
    for name in chosen.only:
        rows: dict[str, dict[str, Any]] = {}
        for way in chosen.ways:
            rows[way] = row_of(*run_script("worker.py", way, name))
        show(name, COLUMNS, {way: cells(row) for way, row in rows.items()})
        wrong += failures_of(name, rows)
        results[name] = rows
    checks = CHECKS if chosen.checks else ()
    results["checks"] = {check: run_script("checks.py", check)[1] or "holds" for check in checks}
    for check, answer in results["checks"].items():
        sys.stdout.write(f"{check}: {answer}\n")
        wrong += [f"{check}: {answer}"] if answer != "holds" else []
    return finish(results, wrong, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
