"""Fixtures of the pool's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pools import simulated

from mempool import Pool

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(simulated(), background=False) as made:
        yield made
