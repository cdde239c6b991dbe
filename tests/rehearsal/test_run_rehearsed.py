"""``mempool run --rehearse``: a plan from the stand-in serves the first step of the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mempool.rehearsal import standin

PROGRAMS = Path(__file__).with_name("programs")
PROGRAM = PROGRAMS / "loop.py"
STARTUP = Path(standin.__file__).with_name("startup")


def run(
    folder: Path, libraries: dict[str, str], program: Path, *arguments: str, compiles: bool = False
) -> tuple[dict[str, Any], str]:
    """Rehearse and run a training on the stand-in, in place of a GPU; return report and messages."""
    file, work = folder / "report.json", folder / "work"
    work.mkdir()
    environment = {"PYTHONPATH": str(STARTUP), "MEMPOOL_CACHE": str(folder), "MEMPOOL_REMEMBER": ""}
    command = [Path(sys.executable).with_name("mempool"), "run", "--rehearse", "--json", file]
    done = subprocess.run(
        [*command, program, *arguments],
        env=os.environ | libraries | environment | {"TORCHDYNAMO_DISABLE": str(int(not compiles))},
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(file.read_text())["pools"]["torch"]
    return report, done.stderr


def test_rehearsed_plan_serves_the_run_from_its_first_step(tmp_path: Path, libraries: dict[str, str]) -> None:
    report, messages = run(tmp_path, libraries, PROGRAM, f"--report={tmp_path / 'reported'}")
    assert "rehearsal failed" not in messages
    assert report["plan_active_at_iteration"] == 1
    assert (report["plans"], report["misses_total"]) == (0, 0)
    planned = report["allocations"] - report["small_allocations"]
    assert report["hits_total"] >= 0.99 * planned - 20  # the parameters, and what confirms the plan
    assert report["reserved_peak_bytes"] <= report["live_peak_bytes"] + (6 << 20)  # three partly used pages
    assert len(list((tmp_path / "plans").glob("*.plan"))) == 1


def test_new_folders_and_files_of_a_rehearsal_are_not_in_the_way_of_the_run(
    tmp_path: Path, libraries: dict[str, str]
) -> None:
    _, messages = run(tmp_path, libraries, PROGRAMS / "writes.py")
    assert "rehearsal failed" not in messages
    assert "rehearsed 12 steps" in messages
    assert "new folders stay" not in messages
    assert (tmp_path / "work/out/log.txt").read_text() == "step\n" * 30
    assert (tmp_path / "work/result.txt").read_text() == "done"


@pytest.mark.full
def test_plan_of_a_compiled_program_serves_its_run(tmp_path: Path, libraries: dict[str, str]) -> None:
    report, messages = run(
        tmp_path, libraries, PROGRAM, "--compile", f"--report={tmp_path / 'reported'}", compiles=True
    )
    assert "rehearsal failed" not in messages
    assert (report["plan_active_at_iteration"], report["misses_total"]) == (1, 0)


@pytest.mark.full
def test_plan_of_a_program_that_is_not_compiled_for_lack_of_triton_is_not_handed_on(
    tmp_path: Path, libraries: dict[str, str]
) -> None:
    """Its rehearsal runs operation by operation, in another order than the compiled functions."""
    program = tmp_path / "compiled.py"
    text = PROGRAM.read_text().replace("optimizer =", "model.compile()\noptimizer =")
    program.write_text('import sys\nsys.modules["triton"] = None\n' + text)
    report, messages = run(tmp_path, libraries, program, f"--report={tmp_path / 'reported'}")
    assert "so the run does not follow its plan" in messages
    assert report["plan_active_at_iteration"] != 1
