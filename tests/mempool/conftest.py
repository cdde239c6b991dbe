"""Fixtures of the pool's tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fake_cuda import FakeCuda
from pools import simulated

from mempool import Pool

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "native"))

import build  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(simulated(), background=False) as made:
        yield made


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where objects are kept from one run to the next; a temporary folder where the tree is read-only."""
    kept = ROOT / "build" / "native"
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError:
        return tmp_path_factory.mktemp("native")
    return kept if os.access(kept, os.W_OK) else tmp_path_factory.mktemp("native")


@pytest.fixture(scope="session")
def fake_library(folder: Path) -> Path:
    return build.build_library("fake_cuda", folder)


@pytest.fixture
def fake(fake_library: Path) -> Iterator[FakeCuda]:
    """A CUDA driver with two devices, as nobody has used it."""
    fake = FakeCuda(fake_library)
    yield fake
    assert fake.faults == []
