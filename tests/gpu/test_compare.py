"""Tests of the comparison of allocators on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = ("compare.py", "capacity.py", "predicted.py", "swapping.py")


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_without_a_gpu_name_the_reason_and_succeed(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script))],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout[:18]) == (0, "nothing to compare")
