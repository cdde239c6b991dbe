"""What the native harnesses have in common: runs until time is up, and runs without one guard each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "native"))

import build

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Run = subprocess.CompletedProcess[str]

SOAK_SECONDS = float(os.environ.get("MEMPOOL_STRESS_SECONDS", "60"))


class Seeded:
    """A native program that takes a first seed and how many, under the address sanitizer.

    It prints what it did, and "FAILED" with the seed for the first that goes wrong.
    """

    def __init__(self, name: str, folder: Path, *, soon: bool = True) -> None:
        """Build it, or skip the test where that cannot be done.

        Args:
            name: of its source in `tests/native`.
            folder: where objects are kept.
            soon: so that it compiles soon and runs slowly.
        """
        if not build.has_sanitizer("address"):
            pytest.skip(f"{build.compiler()} cannot build and run programs with the address sanitizer")
        self._program = build.build(name, folder, sanitizer="address", soon=soon)

    def run(self, first: int, count: int, *more: str) -> Run:
        """Run some seeds."""
        command = [str(self._program), str(first), str(count), *more]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=600, check=False, errors="replace"
        )

    def holds(self, count: int) -> None:
        """None of so many seeds fails, and all that can happen did."""
        done = self.run(0, count)
        assert done.returncode == 0, done.stderr[-3000:]
        did = json.loads(done.stdout)
        assert did["seeds"] == count
        assert min(did.values()) > 0, did

    def notices(self, seed: int, fault: str) -> None:
        """A seed that holds fails with this fault when something is spoilt."""
        assert self.run(seed, 1).returncode == 0
        spoilt = self.run(seed, 1, "spoil")
        assert spoilt.returncode == 1
        assert f"FAILED: seed {seed}: {fault}" in spoilt.stderr

    def soak(self) -> None:
        """Seed after seed, until time is up."""
        seeds_until_time_is_up(lambda seed: self.run(1000 * seed, 1000), SOAK_SECONDS)


def seeds_until_time_is_up(run: Callable[[int], Run], seconds: float) -> None:
    """Run seed after seed, none of which may fail."""
    seed = time.time_ns()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done = run(seed)
        assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
        seed += 1


def notices_each(
    guards: Sequence[str], runs_without: Callable[[str | None], list[Run]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Some run fails without each of the guards, and none with all of them; prints how many."""
    survived: list[str | None] = []
    rows = []
    for guard in [None, *guards]:
        runs = runs_without(guard)
        failed = [run for run in runs if run.returncode != 0]
        reason = failed[0].stderr.strip().splitlines()[-1:] if failed else []
        said = "".join(reason) or (f"signal {-failed[0].returncode}" if failed else "")
        rows.append(f"{guard or '(none)':14} {len(failed)}/{len(runs)}  {said}")
        if bool(failed) != (guard is not None):
            survived.append(guard)
    with capsys.disabled():
        print("\nguard          failed  by", *rows, sep="\n")
    assert survived == []
