"""PyTorch's allocators and the pool on this machine's GPU: one table a workload, then what must hold.

    python tests/gpu/compare.py [--json FILE]

Under ten minutes. Without a GPU it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WAYS = ("native", "expandable", "async", "mempool")
NAMES = ("cnn", "gpt", "lengths")
CHECKS = ("record_stream", "graphs", "autograd_threads", "out_of_memory", "statistics")
SECONDS = 120
GIB = 1 << 30


def why_not() -> str | None:
    """Why nothing can be run here, or None."""
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed"
    return None if torch.cuda.is_available() else "PyTorch sees no GPU"


def told(script: str, *arguments: str) -> tuple[str, str]:
    """The last line of a process and, where it failed, why."""
    command = [sys.executable, str(HERE / script), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=HERE)
    except subprocess.TimeoutExpired:
        return "", f"more than {SECONDS} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return lines[-1], ""
    return "", (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]


def show(name: str, rows: dict[str, dict[str, Any]]) -> None:
    """One workload's table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=name)
    for column in (
        "allocator",
        "steps/s",
        "live GiB",
        "reserved GiB",
        "used GiB",
        "stranded",
        "alloc+free ns",
        "hit rate",
        "losses",
    ):
        table.add_column(column, justify="left" if column in ("allocator", "losses") else "right")
    for way, row in rows.items():
        if "error" in row:
            table.add_row(way, row["error"])
            continue
        live, reserved, used = (row[f"{key}_bytes"] / GIB for key in ("live", "reserved", "used"))
        stranded = f"{1 - live / reserved:.1%}" if reserved else "-"
        hits = f"{row['hit_rate']:.3f}" if "hit_rate" in row else "-"
        table.add_row(
            way, f"{row['steps_per_second']:.2f}", f"{live:.2f}", f"{reserved:.2f}", f"{used:.2f}", stranded,
            f"{row['alloc_free_ns']:.0f}", hits, row["losses"],
        )  # fmt: skip
    Console(width=140).print(table)


def main() -> int:
    """Run everything; 1 if losses differ or something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if (reason := why_not()) is not None:
        sys.stdout.write(f"nothing to compare: {reason}\n")
        return 0
    results: dict[str, Any] = {}
    wrong = []
    for name in NAMES:
        rows: dict[str, dict[str, Any]] = {}
        for way in WAYS:
            line, error = told("worker.py", way, name)
            rows[way] = {"error": error} if error else json.loads(line)
        show(name, rows)
        if len({row["losses"] for row in rows.values() if "losses" in row}) > 1:
            wrong.append(f"{name}: the losses differ")
        wrong += [f"{name}: {way}: {row['error']}" for way, row in rows.items() if "error" in row]
        results[name] = rows
    results["checks"] = {check: told("checks.py", check)[1] or "holds" for check in CHECKS}
    for check, answer in results["checks"].items():
        sys.stdout.write(f"{check}: {answer}\n")
        wrong += [f"{check}: {answer}"] if answer != "holds" else []
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")
    for line in wrong:
        sys.stderr.write(f"{line}\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
