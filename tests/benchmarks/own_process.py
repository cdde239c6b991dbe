"""Runs of a benchmark in processes of their own, and the comparison of several runs of one model."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch"))

#: Seconds after which a run is stopped.
PATIENCE = 900


def run_separately(script: str, *arguments: Any) -> dict[str, Any]:
    """Run a script with ``--one ARGUMENTS``; return the JSON of its last line, or its error."""
    command = [sys.executable, script, "--one", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]}
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def print_head(name: str) -> None:
    """Print the head of a model's table."""
    print(f"\n### {name}\n\n| way | limit MB | peak MB | of plain | ms a step | slower | losses |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)


def print_row(rows: dict[str, dict[str, Any]], label: str, limit: int | None) -> None:
    """Print the results of a run, relative to the run of the plain program."""
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


def models(device: str) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return the constructor and batch size of each model of the comparison."""
    from models import GPT, ResNet, UNet

    if device == "cpu":
        return {"ResNet-18": (ResNet, 48), "U-Net": (UNet, 48), "GPT": (lambda: GPT(192, 4), 24)}

    class Long(GPT):
        words, length = 50304, 1024

    class Large(ResNet):
        side = 128

    return {"ResNet-18": (lambda: Large(64), 256), "GPT-2": (lambda: Long(768, 12), 16)}


def digest(losses: list[float]) -> str:
    """Return a text that is the same for losses that are the same to the bit."""
    return hashlib.sha256(repr(losses).encode()).hexdigest()[:16]


def compare(
    script: str,
    name: str,
    device: str,
    *more: str,
    peers: Sequence[str],
    matched: Sequence[str],
    shares: Sequence[float] = (),
) -> dict[str, dict[str, Any]]:
    """Print the table of a model: runs of the peers, then of this project's pool within limits.

    Args:
        script: script of the benchmark; its arguments are a method, the name, the device, a limit and
            ``more``.
        name: name of the model.
        device: kind of device.
        more: further arguments of each run.
        peers: methods of other projects, "plain" among them.
        matched: peers whose peak is a limit of the pool.
        shares: further limits of the pool, as fractions of the plain peak.
    """
    print_head(name)
    rows: dict[str, dict[str, Any]] = {}

    def measure(label: str, way: str, limit: int | None = None) -> None:
        rows[label] = run_separately(script, way, name, device, limit, *more)
        print_row(rows, label, limit)

    for way in peers:
        measure(way, way)
    for way in matched:
        if "error" not in rows[way]:
            measure(f"ours, in the peak of {way}", "ours", rows[way]["peak_bytes"])
    for share in shares:
        measure(f"ours, {share:.0%}", "ours", int(share * rows["plain"]["peak_bytes"]))
    return rows


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every comparison."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--only", nargs="*", help="models")
    made.add_argument("--json", type=Path)
    made.add_argument("--one", help=argparse.SUPPRESS)
    return made


def write(results: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """Write the rows of each model into the file, if any, and return them."""
    if file is not None:
        file.write_text(json.dumps(results, indent=1) + "\n")
    return results
