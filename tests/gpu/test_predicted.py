"""Predicted peaks compared with the counters of a GPU; tests/rehearsal does the same on the stand-in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import predicted as comparison
import pytest


@pytest.mark.gpu
@pytest.mark.usefixtures("torch_gpu")
def test_peaks_are_as_predicted(tmp_path: Path) -> None:
    """At least six peaks are within `predicted.BOUND` of the counters of PyTorch's allocator."""
    script, file = Path(__file__).with_name("predicted.py"), tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, str(script), "--json", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(file.read_text())) >= 6


@pytest.mark.parametrize(("predicted", "wrong"), [(110, False), (111, True), (90, False), (89, True)])
def test_a_prediction_beyond_the_bound_is_too_far(predicted: int, wrong: bool) -> None:
    gib = 1 << 30
    assert comparison.exceeds_bound({"allocated": 100 * gib, "predicted_allocated": predicted * gib}) == wrong
