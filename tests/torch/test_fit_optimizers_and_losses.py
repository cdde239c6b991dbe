"""Optimizers and losses of estimates: state of each, eight-bit layouts, and losses of users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import nn

import mempool.torch
from mempool.cli.app import call
from mempool.errors import UsageError
from mempool.torch.estimate.fake.eight_bit_optimizers import BLOCK, MOMENTS, STAND_INS

pytestmark = pytest.mark.usefixtures("shared_isolation")
SCRIPT = """
import torch
from torch import nn
def plain(batch=64):
    return {"model": nn.Linear(100, 500), "inputs": torch.zeros(batch, 100)}

def named(batch=64):
    return plain(batch) | {"loss": "cross-entropy", "optimizer": "sgd+momentum", "dtype": "bf16"}

def labelled(batch=64):
    return plain(batch) | {"loss": "cross_entropy", "labels": torch.zeros(batch, 500)}

def function_of_batch():
    return {"model": nn.Linear(100, 500), "inputs": lambda batch: torch.zeros(batch, 100), "batch": 64}

def wrong(batch=64):
    return plain(batch) | {"loss": "cross-entropi"}

def number(batch=64):
    return plain(batch) | {"loss": 5}
"""
OPTIONS = ("--loss", "cross-entropy", "--optimizer", "sgd+momentum", "--dtype", "bf16")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.py").write_text(SCRIPT)
    return tmp_path


def test_names_in_a_function_mean_the_same_as_on_the_command_line(folder: Path, fit_json: Any) -> None:
    options, named = fit_json("made.py:plain", *OPTIONS), fit_json("made.py:named")
    for answer in (options, named):
        assert answer["by_class_bytes"]["optimizer_state"] == 196 * 512 + 2 * 512
        assert answer["warnings"] == []
    assert named["peak_bytes"] == options["peak_bytes"]


def test_inputs_may_be_a_function_of_the_batch(folder: Path, fit_json: Any) -> None:
    for options in ((), ("--batch", "8")):
        peak = fit_json("made.py:function_of_batch", *options)["peak_bytes"]
        assert peak == fit_json("made.py:plain", *options)["peak_bytes"]


def test_loss_by_name_takes_no_labels(folder: Path, fit_json: Any) -> None:
    with_labels = fit_json("made.py:labelled")
    assert with_labels["peak_bytes"] == fit_json("made.py:plain", "--loss", "cross-entropy")["peak_bytes"]


@pytest.mark.parametrize(
    ("function", "reason"),
    [("wrong", "did you mean cross-entropy?"), ("number", "loss is 5: neither a function nor a name")],
)
def test_unknown_name_of_a_loss_is_an_error_of_usage(
    folder: Path, capsys: pytest.CaptureFixture[str], function: str, reason: str
) -> None:
    assert call(["fit", f"made.py:{function}"]) == 2
    assert reason in capsys.readouterr().err


def test_python_call_takes_the_names() -> None:
    x = torch.zeros(64, 100)
    named = mempool.torch.fit(nn.Linear(100, 500), x, "sgd+momentum", loss="mse", autocast="bf16")

    def mse(output: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, torch.zeros_like(output))

    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    written = mempool.torch.fit(nn.Linear(100, 500), x, momentum, loss=mse, autocast=torch.bfloat16)
    assert named.peak_bytes == written.peak_bytes
    with pytest.raises(UsageError, match="no optimizer 'adamv'"):
        mempool.torch.fit(nn.Linear(4, 4), x, "adamv")


X = torch.zeros(4, 1000)


def rounded(*sizes: int) -> int:
    return sum(-(-size // 512) * 512 for size in sizes)


def state_bytes(moments: int) -> int:
    """Bytes of 8-bit state of a linear layer of 1000 x 1000, each buffer rounded up to 512."""
    weight, bias = 1_000_000, 1000  # the bias is below 4,096 elements: in 32 bits
    return moments * rounded(weight, 4 * -(-weight // BLOCK), 4 * bias)


@pytest.mark.parametrize("name", STAND_INS)
def test_state_of_an_optimizer_has_its_layout(name: str) -> None:
    made = mempool.torch.fit(nn.Linear(1000, 1000), X, STAND_INS[name])
    assert made.by_class_bytes["optimizer_state"] == state_bytes(MOMENTS[name])


@pytest.mark.parametrize("name", ["adamw8bit", "AdamW_8bit", "adamw_bnb_8bit", "lion-8bit"])
def test_command_takes_the_names_of_the_package_and_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fit_json: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("from torch import nn\nmodel = nn.Linear(1000, 1000)\n")
    inputs = ["--inputs", "float32[B,1000]", "--batch", "4", "--loss", "mse"]
    found = fit_json("net.py:model", *inputs, "--optimizer", name)["by_class_bytes"]["optimizer_state"]
    assert found == state_bytes(1 if "lion" in name else 2)


@pytest.mark.parametrize("name", STAND_INS)
def test_layout_equals_a_real_state(name: str) -> None:
    """On the CPU the package keeps the same state, and two tables of 256 values."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    parameters = [nn.Parameter(torch.ones(size)) for size in (100, 4095, 4096, 10_000)]
    real = getattr(bitsandbytes.optim, name)(parameters)
    made = STAND_INS[name](parameters)
    for number, parameter in enumerate(parameters):
        real.init_state(real.param_groups[0], parameter, 0, number)
        state = {
            key: value for key, value in real.state[parameter].items() if isinstance(value, torch.Tensor)
        }
        ours = made.state_of(parameter)
        assert {k: v.nbytes for k, v in ours.items()} == {
            k: v.nbytes for k, v in state.items() if not k.startswith("qmap")
        }
