"""The packing kernels without Python, under sanitizers: see tests/native/packing.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from harness_runs import Seeded

if TYPE_CHECKING:
    from pathlib import Path


def test_every_kernel_packs_random_jobs_correctly(folder: Path) -> None:
    Seeded("packing", folder).holds(60)


def test_harness_notices_a_wrong_offset(folder: Path) -> None:
    Seeded("packing", folder).notices(2, "skyline: two jobs overlap")


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(0)
def test_every_kernel_packs_many_random_jobs_correctly(folder: Path) -> None:
    Seeded("packing", folder, soon=False).soak()
