"""One run of a benchmark in a process of its own, and the table of several runs of one model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

#: Seconds after which a run is given up.
PATIENCE = 900


def told(script: str, *arguments: Any) -> dict[str, Any]:
    """What a script says last, as JSON, when it is given ``--one ARGUMENTS``; or what went wrong."""
    command = [sys.executable, script, "--one", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]}
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def print_head(name: str) -> None:
    """Begin the table of a model."""
    print(f"\n### {name}\n\n| way | limit MB | peak MB | of plain | ms a step | slower | losses |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)


def print_row(rows: dict[str, dict[str, Any]], label: str, limit: int | None) -> None:
    """Print a run beside the run of the plain program."""
    row, plain = rows[label], rows["plain"]
    if "error" in row:
        print(f"| {label} | {row['error']} |", flush=True)
        return
    cells = [
        label,
        "" if limit is None else f"{limit / 1e6:.1f}",
        f"{row['peak_bytes'] / 1e6:.1f}",
        f"{100 * row['peak_bytes'] / plain['peak_bytes']:.1f} %",
        f"{1e3 * row['seconds']:.0f}",
        f"{100 * (row['seconds'] / plain['seconds'] - 1):.1f} %",
        "the same" if row["losses"] == plain["losses"] else "others",
    ]
    print("|", " | ".join(cells), "|", flush=True)
