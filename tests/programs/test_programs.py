"""Unmodified programs under the pool: equal results, hit rates and reserved memory."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MEMPOOL = Path(sys.executable).with_name("mempool")
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith(("MEMPOOL", "PYTHONPATH"))
} | {
    "MEMPOOL_REMEMBER": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}

#: `mempool demo` trains a network.
PROGRAMS = (("solve_poisson.py", 512, 260), ("count_cells.py", 220))
LONG_RUNS = {"solve_poisson.py": (512, 500), "count_cells.py": (220,)}


def run(*command: object) -> str:
    """Run a command in a folder without this project's packages; return its output."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=HERE,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def reported(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())["pools"]["numpy"]
    return report


@dataclass(frozen=True)
class Ran:
    """Results of a program with and without the pool; the recorded trace is in the folder."""

    program: tuple[str | int, ...]
    printed: str
    folder: Path


@pytest.fixture(scope="module", params=PROGRAMS, ids=lambda program: program[0])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("programs")
    first = run(sys.executable, *request.param)
    options = ("--quiet", "--record", folder / "trace", "--json", folder / "report.json")
    assert run(MEMPOOL, "run", *options, *request.param) == first
    return Ran(request.param, first, folder)


def test_results_are_the_same_and_the_steady_state_follows_the_plan(ran: Ran) -> None:
    """The output equals that of plain Python; without marks, 999 of 1000 allocations hit."""
    report = reported(ran.folder / "report.json")
    assert report["state"] == "replaying"
    assert report["latest_plan_misses"] < 0.001 * report["hits"], report["misses_by_reason"]
    assert report["plans"] <= 4
    assert report["hit_rate"] > 0.99, report["misses_by_reason"]
    assert report["coverage"] >= 0.99
    assert report["hits"] >= 0.5 * (report["allocations"] - report["small_allocations"])


def test_reserved_memory_is_the_peak_load_and_persistent_bytes(ran: Ran) -> None:
    """Measured in the last tenth: a busy machine plans late, and the pool trims an iteration later."""
    samples_file = ran.folder / "samples.json"
    program = str(ran.program[0])
    run(MEMPOOL, "run", "--quiet", "observe.py", samples_file, program, *LONG_RUNS[program])
    samples = json.loads(samples_file.read_text())
    steady = samples[-len(samples) // 10 :]
    assert {sample["state"] for sample in steady} == {"replaying"}
    # The figures of one sample are read one after another while buffers come and go: the median is exact.
    ratios = [s["reserved_bytes"] / (s["peak_load_bytes"] + s["persistent_bytes"]) for s in steady]
    assert statistics.median(ratios) <= 1.02


def test_a_recorded_trace_replays_from_the_first_iterations(ran: Ran) -> None:
    """With a saved plan, only the allocations around the loop and those that confirm the plan may miss."""
    plan, report_file = ran.folder / "plan", ran.folder / "replayed.json"
    run(MEMPOOL, "plan", ran.folder / "trace", "-o", plan)
    printed = run(MEMPOOL, "run", "--quiet", "--plan", plan, "--json", report_file, *ran.program)
    assert printed == ran.printed
    report = reported(report_file)
    assert (
        report["plan_active_at_iteration"] <= 2
    )  # the warm-up, whose buffers have no offsets, counts as one
    assert report["plans"] == 0
    assert report["misses"] <= 4, report["misses_by_reason"]
    assert report["hits"] + report["dynamic"] >= 0.98 * (report["allocations"] - report["small_allocations"])


def test_a_plan_is_in_effect_by_the_eighth_iteration(tmp_path: Path) -> None:
    """The iterations are long enough for the planner's thread to run in parallel."""
    report_file = tmp_path / "report.json"
    run(MEMPOOL, "run", "--quiet", "--json", report_file, "solve_poisson.py", 2048, 20)
    report = reported(report_file)
    assert report["plan_active_at_iteration"] <= 8
    assert report["misses"] == 0
