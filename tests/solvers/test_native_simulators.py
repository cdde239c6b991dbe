"""The simulated allocators without Python, under sanitizers: see tests/native/simulators.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from harness_runs import Seeded

if TYPE_CHECKING:
    from pathlib import Path


def test_random_events_leave_every_allocator_in_order(folder: Path) -> None:
    Seeded("simulators", folder).holds(60)


def test_harness_notices_a_wrong_address(folder: Path) -> None:
    Seeded("simulators", folder).notices(0, "fit: two blocks overlap")


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_random_events_leave_every_allocator_in_order(folder: Path) -> None:
    Seeded("simulators", folder, soon=False).soak()
