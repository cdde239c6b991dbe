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


def models(device: str) -> dict[str, tuple[Callable[[], Any], int]]:
    """Constructor and batch of each model that is compared with peers."""
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
    """Run peers, then ours in the peak of each matched peer and in shares of the plain peak; print the table.

    Args:
        script: the benchmark; gets a peer, the name, the device, a limit and ``more``.
        name: of the model.
        device: kind of device.
        more: further arguments of each run.
        peers: others' ways, "plain" among them.
        matched: the peers in whose peak ours runs.
        shares: of the plain peak.
    """
    print_head(name)
    rows: dict[str, dict[str, Any]] = {}

    def measure(label: str, way: str, limit: int | None = None) -> None:
        rows[label] = told(script, way, name, device, limit, *more)
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
    """Write the rows of each model into a file where wanted, and return them."""
    if file is not None:
        file.write_text(json.dumps(results, indent=1) + "\n")
    return results
