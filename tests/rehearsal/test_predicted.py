"""Peaks that `fit` predicts, beside PyTorch's own CUDA allocator on the stand-in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mempool.errors import UsageError
from mempool.rehearsal import standin

SCRIPT = Path(__file__).parents[1] / "gpu" / "predicted.py"
#: Without convolutions, whose workspaces are a model on both sides, and models of transformers.
MODELS = ["mlp", "gpt-autocast", "encoder-float16", "gpt-inference"]


def test_predicted_peaks_are_near_pytorchs_counters(tmp_path: Path) -> None:
    try:
        standin.find_installation()
    except UsageError:
        pytest.skip("no CUDA build of PyTorch is installed")
    command = [sys.executable, str(SCRIPT), "--stand-in", "--json", str(tmp_path / "rows.json"), *MODELS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(json.loads((tmp_path / "rows.json").read_text())) == MODELS
