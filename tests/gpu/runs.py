"""Common functions of the comparisons: search for a GPU, runs in separate processes, tables, exit status."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SECONDS = 120
GIB = 1 << 30


def gpu_unavailable_reason(framework: str) -> str | None:
    """Return the reason why "torch" or "cupy" cannot use a GPU, or None if it can."""
    name = {"torch": "PyTorch", "cupy": "CuPy"}[framework]
    try:
        library = importlib.import_module(framework)
    except ImportError:
        return f"{name} is not installed"
    return None if library.cuda.is_available() else f"{name} sees no GPU"


def _exit_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that a child process that uses the GPU is killed too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def run_script(script: str, *arguments: str, seconds: float = SECONDS) -> tuple[str, str]:
    """Run a script; return its last line and an empty string, or an empty line and its error."""
    command = [sys.executable, str(HERE / script), *arguments]
    _exit_on_sigterm()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=HERE)
    except subprocess.TimeoutExpired as late:
        sys.stderr.write((late.stderr or b"").decode(errors="replace"))
        return "", f"more than {seconds:.0f} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return lines[-1], ""
    sys.stderr.write(done.stderr)
    return "", (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]


def row_of(line: str, error: str) -> dict[str, Any]:
    """Return the JSON object of a script's last line, or a row with its error."""
    row: dict[str, Any] = {"error": error} if error else json.loads(line)
    return row


def failures_of(name: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line if the runs of a workload have different losses, and a line for each failed run."""
    differ = len({row["losses"] for row in rows.values() if "losses" in row}) > 1
    failed = [f"{name}: {way}: {row['error']}" for way, row in rows.items() if "error" in row]
    return [f"{name}: the losses differ"] * differ + failed


def show(title: str, columns: tuple[str, ...], rows: dict[str, list[str]]) -> None:
    """Print a table; a row starts with its name, and a single cell (a sentence) goes into the last column."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in (columns[0], columns[-1]) else "right")
    for name, row in rows.items():
        table.add_row(name, *[""] * (len(columns) - 2 if len(row) == 1 else 0), *row)
    Console(width=140).print(table)


def finish(results: dict[str, Any], wrong: list[str], file: Path | None) -> int:
    """Write the results to a file, if any, and the failures to stderr; return 1 if there are failures."""
    if file is not None:
        file.write_text(json.dumps(results, indent=1) + "\n")
    for line in wrong:
        sys.stderr.write(f"{line}\n")
    return bool(wrong)
