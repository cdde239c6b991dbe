"""PyTorch's allocators and the pool on this machine's GPU: one table a workload, then what must hold.

    python tests/gpu/compare.py [--json FILE] [--only WORKLOAD ...] [--ways ALLOCATOR ...] [--no-checks]

The pool twice, with plain and with growing memory. Under ten minutes. Without a GPU it says so and ends
with 0. "Live" is the most that is alive at once, "reserved" what an allocator holds at the end, "most" what
it held at most since the beginning, "used" what the driver misses at the end. Hits are of the timed steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from runs import GIB, finish, row_of, show, told, why_not, wrong_in

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
    """One allocator's line of the table."""
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
    """Run everything; 1 if losses differ or something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--checks", action=argparse.BooleanOptionalAction, default=True)
    chosen = parser.parse_args()
    if (reason := why_not("torch")) is not None:
        sys.stdout.write(f"nothing to compare: {reason}\n")
        return 0
    results: dict[str, Any] = {}
    wrong: list[str] = []
    for name in chosen.only:
        rows: dict[str, dict[str, Any]] = {}
        for way in chosen.ways:
            rows[way] = row_of(*told("worker.py", way, name))
        show(name, COLUMNS, {way: cells(row) for way, row in rows.items()})
        wrong += wrong_in(name, rows)
        results[name] = rows
    checks = CHECKS if chosen.checks else ()
    results["checks"] = {check: told("checks.py", check)[1] or "holds" for check in checks}
    for check, answer in results["checks"].items():
        sys.stdout.write(f"{check}: {answer}\n")
        wrong += [f"{check}: {answer}"] if answer != "holds" else []
    return finish(results, wrong, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
