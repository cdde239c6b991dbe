"""Make this folder's scripts importable, and skip tests without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import runs


def _needs(framework: str) -> None:
    if (reason := runs.gpu_unavailable_reason(framework)) is not None:
        pytest.skip(reason)


@pytest.fixture
def torch_gpu() -> None:
    """Skip the test if PyTorch sees no GPU."""
    _needs("torch")


@pytest.fixture
def cupy_gpu() -> None:
    """Skip the test if CuPy sees no GPU."""
    _needs("cupy")
