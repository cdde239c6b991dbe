"""The reader of snapshots without Python, under sanitizers: see tests/native/snapshots.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from harness_runs import Seeded

if TYPE_CHECKING:
    from pathlib import Path


def test_random_snapshots_are_read_correctly_or_refused(folder: Path) -> None:
    Seeded("snapshots", folder).holds(60)


def test_harness_notices_a_missing_row(folder: Path) -> None:
    Seeded("snapshots", folder).notices(2, "not as many rows as were written")


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_random_snapshots_are_read_correctly_or_refused(folder: Path) -> None:
    Seeded("snapshots", folder, soon=False).soak()
