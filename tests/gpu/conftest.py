"""The scripts of this folder can be imported, and what needs a GPU is skipped where a framework sees none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import runs


def _needs(framework: str) -> None:
    if (reason := runs.why_not(framework)) is not None:
        pytest.skip(reason)


@pytest.fixture
def torch_gpu() -> None:
    """PyTorch sees one."""
    _needs("torch")


@pytest.fixture
def cupy_gpu() -> None:
    """CuPy sees one."""
    _needs("cupy")
