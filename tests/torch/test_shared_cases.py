"""Scripts among the shared cases that estimate: each has the right value."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from cases import run_case

if TYPE_CHECKING:
    from pathlib import Path

RENAMED = {"mempool.torch.fitting": "mempool.torch.estimate"}


@pytest.mark.full
def test_shared_generation_names_the_line_that_ends_its_loop() -> None:
    printed = run_case("fit_generation.py")
    assert re.search(r"only of what ran: \S*decoder.py:21 decides by values of tensors", printed)


@pytest.mark.full  # test_fit_inference has small models with a cache
def test_shared_model_at_32k_tokens_has_a_single_cache_unless_the_output_is_held() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    printed = run_case("fit_kv_twice.py", RENAMED)
    rows = re.findall(r"given (\w+) +hold_output (\w+) *: peak +([\d.]+) GiB", printed)
    peaks = {(mask, held): float(gib) for mask, held, gib in rows}
    assert len(peaks) == 4
    for (_, held), gib in peaks.items():
        assert 30.5 < gib - 17.95 * (held == "True") < 32


@pytest.mark.full
def test_shared_losses_of_a_script_equal_the_given_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case trains with a script of its author's, which is not among the cases."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "nll.py").write_text(TRAIN)
    printed = run_case("fit_handwritten_loss.py", RENAMED)
    rows = re.findall(r"script: peak load +([\d.]+) GiB.* loss given: ([\d.]+) GiB", printed)
    assert len(rows) == 4, printed
    for script, given in rows:
        assert float(script) == pytest.approx(float(given), rel=0.01)
    assert "not a function of the output alone" not in printed


@pytest.mark.full  # test_cli_fit_device and test_fit_fidelity compare random and small models
def test_shared_script_has_the_peak_of_a_real_run_on_the_cpu() -> None:
    printed = run_case("fit_device.py")
    real, script = (re.search(rf"{name}\D* (\d+)\b", printed) for name in ("real", "fit script --main"))
    assert real is not None
    assert script is not None
    assert int(script[1]) == pytest.approx(int(real[1]), abs=24)


@pytest.mark.full  # test_trainer_accumulates has a smaller model
def test_shared_trainer_is_tried_with_its_accumulation() -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    own, asked = run_case("fit_trainer_accumulate.py").splitlines()
    assert own.partition("] ")[2] == asked.partition("] ")[2]


TRAIN = """
import sys, torch
from torch import nn
import torch.nn.functional as F

model = nn.Sequential(nn.Embedding(50257, 256), nn.Linear(256, 50257))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
x = y = torch.zeros(4096, dtype=torch.long)
for _ in range(2):
    o = model(x)
    if sys.argv[1] == "ce":
        loss = F.cross_entropy(o, y)
    elif sys.argv[1] == "method":
        loss = -o.log_softmax(-1).gather(1, y[:, None]).mean()
    elif sys.argv[1] == "sq":
        loss = ((o - F.one_hot(y, 50257)) ** 2).mean()
    else:
        loss = (torch.logsumexp(o, -1) - o[torch.arange(len(y)), y]).mean()
    loss.backward()
    sgd.step()
    sgd.zero_grad()
"""
