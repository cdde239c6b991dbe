"""PyTorch's CUDA functions without PyTorch and without a GPU, under sanitizers and without their guards.

See tests/native/torch_cuda.cpp.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import guards
import pytest
from harness_runs import notices_each, seeds_until_time_is_up

import build

if TYPE_CHECKING:
    from pathlib import Path

#: MEMPOOL_STRESS_SECONDS: how long a full or soak run goes on for each build.
FULL_SECONDS = float(os.environ.get("MEMPOOL_STRESS_SECONDS", "60"))


def harness(folder: Path, sanitizer: str, *, mutations: bool = False, soon: bool = True) -> tuple[Path, Path]:
    """Build the program and the driver for it."""
    if not build.has_sanitizer(sanitizer):
        pytest.skip(f"{build.compiler()} cannot build and run programs with the {sanitizer} sanitizer")
    program = build.build("torch_cuda", folder, sanitizer=sanitizer, mutations=mutations, soon=soon)
    return program, build.build_library("fake_cuda", folder, sanitizer=sanitizer)


def stress(
    program: tuple[Path, Path], seed: int, rounds: int, *, removed: str | None = None
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, TSAN_OPTIONS="halt_on_error=1")
    if removed is not None:
        environment["MEMPOOL_REMOVED_GUARD"] = removed
    command = [*map(str, program), str(seed), str(rounds), "3"]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False, errors="replace"
    )


@pytest.mark.parametrize("sanitizer", ["address", pytest.param("thread", marks=pytest.mark.full)])
def test_tensors_streams_and_graphs_on_threads_keep_every_invariant(folder: Path, sanitizer: str) -> None:
    program = harness(folder, sanitizer)
    seen = dict.fromkeys(("refused", "foreign", "captures", "launches", "clients", "hits"), 0)
    # Three seeds at least; what they come to meet is up to the threads' schedule.
    for seed in range(12):
        done = stress(program, seed, 3)
        assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
        told = json.loads(done.stdout)
        seen = {name: count + told[name] for name, count in seen.items()}
        if seed >= 2 and all(seen.values()):
            return
    pytest.fail(f"some of it never happened: {seen}")


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("sanitizer", ["none", "address", "thread"])
def test_many_seeds_on_threads_keep_every_invariant(folder: Path, sanitizer: str) -> None:
    program = harness(folder, sanitizer, soon=False)
    seeds_until_time_is_up(lambda seed: stress(program, seed, 8), FULL_SECONDS)


@pytest.mark.mutation
@pytest.mark.timeout(0)
def test_harness_notices_each_removed_guard(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = harness(folder, "none", mutations=True)

    def runs(guard: str | None) -> list[subprocess.CompletedProcess[str]]:
        """Run seeds until a failure: few seeds meet some guards, and the threads' schedule decides."""
        done: list[subprocess.CompletedProcess[str]] = []
        while len(done) < (4 if guard is None else 40) and not (done and done[-1].returncode):
            done.append(stress(program, len(done), 6, removed=guard))
        return done

    notices_each(guards.CUDA, runs, capsys)


def test_bodies_and_failures_of_captures_and_a_fraction_of_two_pools(folder: Path) -> None:
    """See tests/native/torch_scenarios.cpp."""
    program = build.build("torch_scenarios", folder, sanitizer="address")
    driver = build.build_library("fake_cuda", folder, sanitizer="address")
    done = subprocess.run(
        [program, driver], capture_output=True, text=True, timeout=280, check=False, errors="replace"
    )
    assert (done.returncode, done.stdout) == (0, "holds\n"), done.stderr[-3000:]
