"""The core in a simulated world: see tests/native/world/world.hpp."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import harness_runs
import pytest
import soak

import build

#: Faults found by a world: the guard that prevents the fault, and the world.
FOUND = [
    ("resize_shared", 65, "whole", 2000),
    ("vain_wait", 10, "whole", 3000),
    ("vain_wait", 10, "inside", 3000),
    ("held_order", 1796124275300, "inside", 700),
    ("region_table", 2622, "whole", 100),
    ("region_table", 9375, "inside", 100),
    ("replays", 1050, "whole", 300),
]
SOAK_SECONDS = float(os.environ.get("MEMPOOL_STRESS_SECONDS", "60"))


def world(folder: Path, sanitizer: str = "none", *, soon: bool = True) -> Path:
    if not build.has_sanitizer(sanitizer):
        pytest.skip(f"{build.compiler()} cannot build and run programs with the {sanitizer} sanitizer")
    return build.build("world", folder, sanitizer=sanitizer, soon=soon and sanitizer == "address")


@pytest.mark.parametrize("mode", soak.MODES)
@pytest.mark.parametrize(
    ("sanitizer", "count"),
    [
        ("address", 8),
        pytest.param("none", 200, marks=pytest.mark.full),
        pytest.param("thread", 30, marks=pytest.mark.full),
    ],
)
def test_worlds_keep_every_promise(folder: Path, sanitizer: str, count: int, mode: str) -> None:
    did = soak.worlds(world(folder, sanitizer), 17, count, mode)
    assert did["worlds"] == count
    assert did["hit"] > 100 * count
    assert did["refused"] > 0
    assert did["host_refused"] > 0


@pytest.mark.parametrize("mode", soak.MODES)
@pytest.mark.parametrize("others", [(), pytest.param(("none",), marks=pytest.mark.full)], ids=["", "all"])
def test_seed_makes_the_same_world_in_every_build(folder: Path, mode: str, others: tuple[str, ...]) -> None:
    def did(sanitizer: str) -> dict[str, Any]:
        return {k: v for k, v in soak.worlds(world(folder, sanitizer), 7, 2, mode).items() if k != "seconds"}

    first = did("address")
    assert all(did(sanitizer) == first for sanitizer in ("address", *others))


@pytest.mark.parametrize(("guard", "seed", "mode", "steps"), FOUND)
def test_faults_found_by_worlds_stay_fixed(
    folder: Path, guard: str, seed: int, mode: str, steps: int
) -> None:
    program = world(folder, "address")
    soak.worlds(program, seed, 1, mode, steps=steps)
    with pytest.raises(soak.WorldError, match=rf"(?s)seed {seed}\b.* ?{mode}"):
        soak.worlds(program, seed, 1, mode, steps=steps, MEMPOOL_REMOVED_GUARD=guard)


def test_failure_is_shrunk_to_its_essential_steps(folder: Path) -> None:
    program = world(folder, "address")
    told = soak.minimal_failure(program, 65, "whole", steps=2000, MEMPOOL_REMOVED_GUARD="resize_shared")
    assert int(re.search(r"fails in (\d+) steps", told)[1]) < 25  # type: ignore[index]
    assert "uses buffer #" in told
    assert "memory that another stream may still use" in told.splitlines()[-1]
    assert "does not fail" in soak.minimal_failure(program, 65, "whole", steps=2000)


def test_every_guard_of_the_core_is_covered_by_some_harness() -> None:
    texts = (path.read_text() for path in build.CORE.rglob("*.[ch]pp"))
    named = {name for text in texts for name in re.findall(r'MEMPOOL_GUARDED\("(\w+)"\)', text)}
    found = {guard for guard, *_ in FOUND}
    assert named == {*harness_runs.WORLD, *harness_runs.STRESS, *found}


@pytest.mark.mutation
@pytest.mark.timeout(0)
def test_worlds_notice_each_removed_guard(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = world(folder)
    rows, survived = [], []
    for guard, modes in harness_runs.WORLD.items():
        for mode in modes:
            try:
                soak.worlds(program, 1, 300, mode, MEMPOOL_REMOVED_GUARD=guard)
            except soak.WorldError as error:
                rows.append(f"{guard:14} {mode:7} {str(error)[:120]}")
            else:
                survived.append((guard, mode))
    with capsys.disabled():
        print("\nguard          threads  caught by", *rows, sep="\n")
    assert survived == []


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("sanitizer", list(build.SANITIZERS))
def test_many_worlds_keep_every_promise(
    folder: Path, sanitizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program = world(folder, sanitizer, soon=False)
    did = soak.soak(program, SOAK_SECONDS, time.time_ns() // 1_000_000, os.cpu_count() or 1)
    with capsys.disabled():
        print(f"\n{sanitizer}: {did}")
