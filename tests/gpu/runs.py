"""What the comparisons do alike: ask for a GPU, measure in a process of its own, show tables, end."""

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


def why_not(framework: str) -> str | None:
    """Why nothing can be run here with "torch" or "cupy", or None."""
    name = {"torch": "PyTorch", "cupy": "CuPy"}[framework]
    try:
        library = importlib.import_module(framework)
    except ImportError:
        return f"{name} is not installed"
    return None if library.cuda.is_available() else f"{name} sees no GPU"


def _ends_with_its_processes() -> None:
    """Whoever ends this one by SIGTERM ends what it waits for, too, which would go on using the GPU."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def told(script: str, *arguments: str, seconds: float = SECONDS) -> tuple[str, str]:
    """The last line of a process and, where it failed, why; all that it complained of goes to stderr then."""
    command = [sys.executable, str(HERE / script), *arguments]
    _ends_with_its_processes()
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
    """What a process told of its run as JSON, or its error."""
    row: dict[str, Any] = {"error": error} if error else json.loads(line)
    return row


def wrong_in(name: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    """What is wrong with the runs of a workload: losses that differ, and each that failed."""
    differ = len({row["losses"] for row in rows.values() if "losses" in row}) > 1
    failed = [f"{name}: {way}: {row['error']}" for way, row in rows.items() if "error" in row]
    return [f"{name}: the losses differ"] * differ + failed


def show(title: str, columns: tuple[str, ...], rows: dict[str, list[str]]) -> None:
    """A table; a row's name comes first, and a row of one cell is a sentence, which goes last."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in (columns[0], columns[-1]) else "right")
    for name, row in rows.items():
        table.add_row(name, *[""] * (len(columns) - 2 if len(row) == 1 else 0), *row)
    Console(width=140).print(table)


def finish(results: dict[str, Any], wrong: list[str], file: Path | None) -> int:
    """Write the results where wanted, and what is wrong to stderr; 1 if anything is."""
    if file is not None:
        file.write_text(json.dumps(results, indent=1) + "\n")
    for line in wrong:
        sys.stderr.write(f"{line}\n")
    return bool(wrong)
