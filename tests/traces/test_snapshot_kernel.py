"""The reader of snapshots without Python, under sanitizers: see tests/native/snapshots.cpp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness_runs import seeds_until_time_is_up

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "native"))

import build  # noqa: E402

SOAK_SECONDS = float(os.environ.get("MEMPOOL_STRESS_SECONDS", "60"))


def harness(folder: Path, *, soon: bool) -> Path:
    if not build.has_sanitizer("address"):
        pytest.skip(f"{build.compiler()} cannot build and run programs with the address sanitizer")
    return build.build("snapshots", folder, sanitizer="address", soon=soon)


def snapshots(program: Path, first: int, count: int, *more: str) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(first), str(count), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, errors="replace")


def test_random_snapshots_are_read_rightly_or_refused(folder: Path) -> None:
    done = snapshots(harness(folder, soon=True), 0, 100)
    assert done.returncode == 0, done.stderr[-3000:]
    did = json.loads(done.stdout)
    assert did["seeds"] == 100
    assert min(did.values()) > 10, did  # all that can happen did


def test_the_harness_notices_a_row_too_few(folder: Path) -> None:
    program = harness(folder, soon=True)
    assert snapshots(program, 2, 1).returncode == 0
    spoilt = snapshots(program, 2, 1, "spoil")
    assert spoilt.returncode == 1
    assert "FAILED: seed 2: not as many rows as were written" in spoilt.stderr


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_random_snapshots_are_read_rightly_or_refused(folder: Path) -> None:
    program = harness(folder, soon=False)
    seeds_until_time_is_up(lambda seed: snapshots(program, 1000 * seed, 1000), SOAK_SECONDS)
