"""``mempool run --rehearse``: a plan from the stand-in serves the first step of the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mempool.rehearsal import standin

PROGRAM = Path(__file__).with_name("programs") / "loop.py"
STARTUP = Path(standin.__file__).with_name("startup")


def run(folder: Path, libraries: dict[str, str], *options: str) -> tuple[dict[str, Any], str]:
    """Run a training on the stand-in, in place of a GPU; return the pool's report and the messages."""
    file = folder / "report.json"
    environment = {"PYTHONPATH": str(STARTUP), "MEMPOOL_CACHE": str(folder), "MEMPOOL_REMEMBER": ""}
    command = [Path(sys.executable).with_name("mempool"), "run", "--quiet", "--json", file, *options]
    done = subprocess.run(
        [*command, PROGRAM, f"--report={folder / 'reported'}"],
        env=os.environ | libraries | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(file.read_text())["pools"]["torch"]
    return report, done.stderr


def test_rehearsed_plan_serves_the_run_from_its_first_step(tmp_path: Path, libraries: dict[str, str]) -> None:
    report, messages = run(tmp_path, libraries, "--rehearse")
    assert "rehearsal failed" not in messages
    assert report["plan_active_at_iteration"] == 1
    assert (report["plans"], report["misses_total"]) == (0, 0)
    planned = report["allocations"] - report["small_allocations"]
    assert report["hits_total"] >= 0.99 * planned - 20  # the parameters, and what confirms the plan
    assert report["reserved_peak_bytes"] <= report["live_peak_bytes"] + (6 << 20)  # three partly used pages
    assert len(list((tmp_path / "plans").glob("*.plan"))) == 1
