"""How little memory each allocator can train in on this machine's GPU: one table a workload.

    python tests/gpu/capacity.py [--json FILE] [--only WORKLOAD ...] [--ways ALLOCATOR ...]

Each may hold so many times what is alive at most, by `torch.cuda.set_per_process_memory_fraction`. Below a
table stands what those said that ran out of memory. Without a GPU it says so and ends with 0; losses that
differ end it with 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from compare import WAYS
from runs import GIB, finish, row_of, show, told, why_not, wrong_in

NAMES = ("gpt", "lengths", "any length")
SHARES = (1.03, 1.1, 1.25)


def run(way: str, name: str, limit: int) -> dict[str, Any]:
    """One run, or what went wrong."""
    return row_of(*told("worker.py", way, name, str(limit)))


def cell(row: dict[str, Any]) -> str:
    """How a run ended."""
    if "error" in row:
        return f"failed: {row['error'][:40]}"
    if "out_of_memory" in row:
        return f"out of memory in step {row['steps'] + 1}"
    hits = f", {row['hit_rate']:.1%} hits" if row.get("hit_rate") is not None else ""
    return f"{row['most_reserved_bytes'] / GIB:.2f} GiB, {row['retries']} retries{hits}"


def main() -> int:
    """Run everything; 1 if losses differ or a run failed otherwise than for want of memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES, help="of what is alive at most")
    chosen = parser.parse_args()
    if (reason := why_not("torch")) is not None:
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
        wrong += wrong_in(name, results[name])
    return finish(results, wrong, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
