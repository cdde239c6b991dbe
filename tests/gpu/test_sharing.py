"""Tests of each pair of frameworks that share a GPU's memory: see sharing.py."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from mempool import _core

pytestmark = pytest.mark.gpu
NEEDS = {"torch": "torch", "cupy": "cupy", "numba": "numba_cuda", "rmm": "rmm"}


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(NEEDS, 2)))
def test_freed_memory_serves_the_other_framework(first: str, second: str) -> None:
    if not _core.cuda_devices():
        pytest.skip("there is no CUDA device")
    for name in (first, second):
        if (
            importlib.util.find_spec(NEEDS[name]) is None
            or importlib.util.find_spec(f"mempool.{name}") is None
        ):
            pytest.skip(f"{name} is not installed, or has no adapter")
    script = Path(__file__).with_name("sharing.py")
    done = subprocess.run(
        [sys.executable, str(script), first, second], capture_output=True, text=True, check=False, timeout=280
    )
    if "CPU-only" in done.stderr or "PyTorch sees 0" in done.stderr:
        pytest.skip("this PyTorch is built for the CPU")
    assert (done.returncode, done.stdout) == (0, "holds\n"), done.stderr[-3000:]
