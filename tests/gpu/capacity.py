"""Least memory in which each allocator can train on this machine's GPU: one table for each workload.

    python tests/gpu/capacity.py [--json FILE] [--only WORKLOAD ...] [--ways ALLOCATOR ...]

The limits are multiples of the peak live bytes, set by `torch.cuda.set_per_process_memory_fraction`.
Out-of-memory messages are printed below the table. The exit status is 0 without a GPU, and 1 if losses
differ.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from compare import WAYS
from runs import GIB, failures_of, finish, gpu_unavailable_reason, row_of, run_script, show

NAMES = ("gpt", "lengths", "any length")
SHARES = (1.03, 1.1, 1.25)


def run(way: str, name: str, limit: int) -> dict[str, Any]:
    """Return the measurements of one run, or its error."""
    return row_of(*run_script("worker.py", way, name, str(limit)))


def cell(row: dict[str, Any]) -> str:
    """Return the table cell of a run."""
    if "error" in row:
        return f"failed: {row['error'][:40]}"
    if "out_of_memory" in row:
        return f"out of memory in step {row['steps'] + 1}"
    hits = f", {row['hit_rate']:.1%} hits" if row.get("hit_rate") is not None else ""
    return f"{row['most_reserved_bytes'] / GIB:.2f} GiB, {row['retries']} retries{hits}"


def main() -> int:
    """Print the tables; return 1 if losses differ or a run fails for another reason than out of memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES, help="of what is alive at most")
    chosen = parser.parse_args()
    if (reason := gpu_unavailable_reason("torch")) is not None:
        sys.stdout.write(f"nothing to compare: {reason}\n")
        return 0
    results: dict[str, Any] = {}
    wrong: list[str] = []
    ways = chosen.ways
    columns = ("allocator", *(f"{share:.2f} times" for share in chosen.shares))
    for name in chosen.only:
        free = run("native", name, 0)
        live = free.get("live_bytes", 0)
        limits = [int(share * live) for share in chosen.shares]
        rows = {(way, limit): run(way, name, limit) for limit in limits for way in ways}
        cells = {way: [cell(rows[way, limit]) for limit in limits] for way in ways}
        show(f"{name}, {live / GIB:.2f} GiB alive at most", columns, cells)
        for (way, limit), row in rows.items():
            if "out_of_memory" in row:
                sys.stdout.write(f"{way}, {limit / GIB:.2f} GiB: {row['out_of_memory']}\n")
        rows["native", 0] = free
        results[name] = {f"{way} {limit}": row for (way, limit), row in rows.items()}
        wrong += failures_of(name, results[name])
    return finish(results, wrong, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
