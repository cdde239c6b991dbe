"""``mempool fit`` on scripts that look at values, or train where nobody sees it: they end, with a line."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from mempool.cli.app import call

if TYPE_CHECKING:
    from pathlib import Path

Script = Any


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Writes train.py: lines before a model, an optimizer and inputs are there, or behind that."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def written(*lines: str, before: str = "") -> str:
        head = ["import torch", before, "net = torch.nn.Linear(64, 64)", "x = torch.randn(8, 64)"]
        head.append("sgd = torch.optim.SGD(net.parameters(), lr=0.1)")
        (tmp_path / "train.py").write_text("\n".join([*head, *lines]) + "\n")
        return "train.py"

    return written


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert call(["fit", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 3) -> str:
    capsys.readouterr()
    assert call(["fit", *arguments]) == code
    error = capsys.readouterr().err
    assert "Traceback" not in error
    (line,) = (line for line in error.splitlines() if line.startswith("mempool:"))
    return line


STEP = "net(x).sum().backward()"


def test_weights_of_a_truncated_normal_distribution_change_nothing(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a script, in a program, and in a function of it."""
    make = "def make(batch=8):\n    {}\n    return net, torch.zeros(batch, 64)"
    draw = "torch.nn.init.trunc_normal_(net.weight, std=0.02)"
    plain = said(capsys, script(STEP))
    assert said(capsys, script(draw, STEP)) == plain
    assert said(capsys, script(draw, STEP), "--main") == plain
    named = said(capsys, script(make.format("pass")) + ":make")
    assert said(capsys, script(make.format(draw)) + ":make") == named
