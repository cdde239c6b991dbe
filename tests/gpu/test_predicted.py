"""What fit predicts against what a GPU measures; and that the comparison itself runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import predicted as comparison
import pytest

SCRIPT = Path(__file__).with_name("predicted.py")


def compared(*arguments: str, json_file: Path) -> dict[str, Any]:
    pytest.importorskip("torch", reason="PyTorch is not installed: no GPU either")
    command = [sys.executable, str(SCRIPT), "--json", str(json_file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: dict[str, Any] = json.loads(json_file.read_text())
    return rows


@pytest.mark.gpu
@pytest.mark.usefixtures("torch_gpu")
def test_peaks_are_as_predicted(tmp_path: Path) -> None:
    """For six models at least, within `predicted.BOUND` of what PyTorch's allocator counts."""
    assert len(compared(json_file=tmp_path / "rows.json")) >= 6


def test_the_comparison_runs_on_a_stand_in(tmp_path: Path) -> None:
    (row,) = compared("--stand-in", "cnn", json_file=tmp_path / "rows.json").values()
    assert row["predicted_allocated"] == pytest.approx(row["allocated"], rel=0.02)


@pytest.mark.full
def test_other_jobs_run_on_a_stand_in(tmp_path: Path) -> None:
    names = {"mlp", "lstm", "encoder-float16", "gpt-inference", "hf-vit", "hf-gpt2"}
    assert set(compared("--stand-in", *names, json_file=tmp_path / "rows.json")) == names


@pytest.mark.parametrize(("predicted", "wrong"), [(110, False), (111, True), (90, False), (89, True)])
def test_a_prediction_that_is_too_far_off_is_told(
    predicted: int,
    wrong: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gib = 10 << 20
    row = {"allocated": 100 * gib, "predicted_allocated": predicted * gib, "peak_operation": "aten::mm"}
    row |= dict.fromkeys(("reserved", "predicted_reserved", "used", "predicted_used", "context"), gib)
    monkeypatch.setattr(comparison, "told", lambda *_, **__: (json.dumps(row), ""))
    monkeypatch.setattr(sys, "argv", ["predicted.py", "--stand-in", "cnn"])
    assert comparison.main() == wrong
    assert ("cnn:" in capsys.readouterr().err) == wrong
