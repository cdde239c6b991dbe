"""``mempool fit`` on scripts that look at values, or train where nobody sees it: they end, with a line."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from mempool.cli.app import call
from mempool.torch.fitting.sources import scripts

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


def test_a_loop_that_only_another_answer_ends_is_refused_at_its_line(
    script: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = "while (x.abs() > 2).any():\n    x = torch.randn(8, 64)"
    line = refused(capsys, script(drawn, STEP), "--main")
    assert "train.py:6: a condition that was true 10,000 times is asked again" in line
    assert line.endswith("tensors have no values here: name a function, train.py:function")
    monkeypatch.setattr(scripts, "_NUMBERS", 2_000)
    drawn = "def draw():\n    return torch.rand(()).item()\nwhile draw() < 0.5: pass"
    line = refused(capsys, script(drawn, STEP))
    assert "train.py:7: a number that was zero 2,000 times is read again" in line


def test_a_long_loop_may_ask_in_each_of_its_steps(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """And a number at another line, or one that is known, is another matter."""
    lines = (
        "for step in range(2_000):",
        "    loss = (net(x) - x).square().mean()",
        "    if loss.isnan(): pass",
        "    assert loss.item() == 0",
        "    assert torch.tensor(step + 0.5).item() == step + 0.5",
    )
    assert said(capsys, script(*lines, STEP))["batch"] == 8


def test_a_function_that_reads_a_value_is_told_with_its_line(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    make = "def make():\n    while (x > 2).any(): pass\n    return net, x"
    line = refused(capsys, script(make) + ":make", code=2)
    assert "a value is read (.item(), a condition) at train.py:7: what follows depends on data" in line
    make = "def make():\n    raise ValueError('no')"
    line = refused(capsys, script(make) + ":make", code=2)
    assert line == "mempool: train.py:make fails while making make at train.py:7: ValueError: no"
