"""Random seeds through the kernels without Python, under sanitizers: see tests/native/seeded.hpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from harness_runs import Seeded

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("program", ["packing", "simulators", "snapshots"])
def test_random_seeds_hold(folder: Path, program: str) -> None:
    Seeded(program, folder).holds(60)


@pytest.mark.parametrize(
    ("program", "seed", "fault"),
    [
        ("packing", 2, "skyline: two jobs overlap"),
        ("simulators", 0, "fit: two blocks overlap"),
        ("snapshots", 2, "snapshots: not as many rows as were written"),
    ],
)
def test_spoilt_result_is_noticed(folder: Path, program: str, seed: int, fault: str) -> None:
    Seeded(program, folder).notices(seed, fault)


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("program", ["packing", "simulators", "snapshots"])
def test_many_random_seeds_hold(folder: Path, program: str) -> None:
    Seeded(program, folder, soon=False).soak()
