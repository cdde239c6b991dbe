"""The core without Python, under sanitizers and with guards removed: see tests/native/stress.cpp."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import harness_runs
import pytest
from harness_runs import assert_guards_needed, seeds_until_time_is_up

import build

DEVICES = ["host", "pages", "whole"]
#: MEMPOOL_STRESS_SECONDS: how long a full or soak run goes on for each build and device.
FULL_SECONDS = float(os.environ.get("MEMPOOL_STRESS_SECONDS", "60"))


def harness(
    folder: Path, sanitizer: str, name: str = "stress", *, mutations: bool = False, soon: bool = True
) -> Path:
    if not build.has_sanitizer(sanitizer):
        pytest.skip(f"{build.compiler()} cannot build and run programs with the {sanitizer} sanitizer")
    return build.build(name, folder, sanitizer=sanitizer, mutations=mutations, soon=soon)


def stress(
    program: Path, device: str, seed: int, rounds: int, *, removed: str | None = None
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, TSAN_OPTIONS="halt_on_error=1")
    if removed is not None:
        environment["MEMPOOL_REMOVED_GUARD"] = removed
    command = [str(program), device, str(seed), str(rounds), "3", "fork"]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False, errors="replace"
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_random_programs_on_threads_keep_every_promise(folder: Path, sanitizer: str, device: str) -> None:
    program = harness(folder, sanitizer)
    hits = 0
    # Two seeds at least, since the threads' schedule decides whether a seed replays a plan.
    for seed in range(1, 12):
        done = stress(program, device, seed, 2)  # the second round forks
        assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
        hits += json.loads(done.stdout)["hit"]
        if seed >= 2 and hits:
            return
    pytest.fail("no program ever replayed a plan")


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sanitizer", ["none", "address", "thread"])
def test_many_random_programs_on_threads_keep_every_promise(
    folder: Path, sanitizer: str, device: str
) -> None:
    program = harness(folder, sanitizer, soon=False)
    seeds_until_time_is_up(lambda seed: stress(program, device, seed, 12), FULL_SECONDS)


@pytest.mark.mutation
@pytest.mark.timeout(0)
def test_harness_notices_each_removed_guard(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = harness(folder, "none", mutations=True)
    assert_guards_needed(
        harness_runs.STRESS,
        lambda guard: [
            stress(program, device, seed, 4, removed=guard)
            for seed in range(1 if guard == "fork" else 3)  # without which a child hangs until its alarm
            for device in (DEVICES[:1] if guard == "fork" else DEVICES)
        ],
        capsys,
    )


@pytest.mark.parametrize("sanitizer", ["address", pytest.param("thread", marks=pytest.mark.full)])
def test_page_locked_memory_waits_for_the_streams_of_its_copies(folder: Path, sanitizer: str) -> None:
    """See tests/native/pinned.cpp."""
    program = harness(folder, sanitizer, "pinned")
    driver = build.build_driver(folder, sanitizer=sanitizer)
    for seed in range(2):
        command = [str(program), str(driver), str(seed), "60"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"


@pytest.mark.parametrize("check", [[], ["check"]], ids=["plain", "check"])
@pytest.mark.parametrize("sanitizer", ["address", pytest.param("thread", marks=pytest.mark.full)])
def test_numpys_clients_are_destroyed_while_threads_allocate(
    folder: Path, sanitizer: str, check: list[str]
) -> None:
    """See tests/native/hook_stress.cpp."""
    command = [harness(folder, sanitizer, "hook_stress"), "100", *check]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
