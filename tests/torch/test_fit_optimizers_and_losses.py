"""Optimizers and losses of estimates: state of each, eight-bit layouts, and losses of users."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import nn

import mempool.torch
from mempool.errors import UsageError
from mempool.torch.estimate.sources.optimizers_and_losses import BLOCK, STAND_INS

pytestmark = pytest.mark.usefixtures("shared_isolation")


@pytest.mark.parametrize(
    ("loss", "reason"),
    [("cross-entropi", "did you mean cross-entropy?"), (5, "loss is 5: neither a function nor a name")],
)
def test_unknown_loss_is_an_error_of_usage(loss: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        mempool.torch.fit(nn.Linear(4, 4), torch.zeros(2, 4), loss=loss)


def test_loss_by_name_takes_no_labels() -> None:
    x = torch.zeros(64, 100)
    plain = mempool.torch.fit(nn.Linear(100, 500), x, loss="cross-entropy")
    labelled = mempool.torch.fit(nn.Linear(100, 500), x, loss="cross_entropy", labels=torch.zeros(64, 500))
    assert labelled.peak_bytes == plain.peak_bytes


def test_python_call_takes_the_names() -> None:
    x = torch.zeros(64, 100)
    named = mempool.torch.fit(nn.Linear(100, 500), x, "sgd+momentum", loss="mse", autocast="bf16")
    written = mempool.torch.fit(
        nn.Linear(100, 500),
        x,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        loss=lambda output: nn.functional.mse_loss(output, torch.zeros_like(output)),
        autocast=torch.bfloat16,
    )
    assert named.peak_bytes == written.peak_bytes
    with pytest.raises(UsageError, match="no optimizer 'adamv'"):
        mempool.torch.fit(nn.Linear(4, 4), x, "adamv")


X = torch.zeros(4, 1000)


def rounded(*sizes: int) -> int:
    return sum(-(-size // 512) * 512 for size in sizes)


def state_bytes(moments: int) -> int:
    """Return the bytes of 8-bit state of a linear layer of 1000 x 1000, each buffer rounded up to 512."""
    weight, bias = 1_000_000, 1000  # the bias is below 4,096 elements: in 32 bits
    return moments * rounded(weight, 4 * -(-weight // BLOCK), 4 * bias)


@pytest.mark.parametrize("name", ["adamw8bit", "AdamW_8bit", "adamw_bnb_8bit", "lion-8bit", "sgd8bit"])
def test_names_of_the_package_and_of_transformers_are_known(name: str) -> None:
    found = mempool.torch.fit(nn.Linear(1000, 1000), X, name, loss="mse").by_class_bytes["optimizer_state"]
    assert found == state_bytes(2 if "adam" in name.lower() else 1)


@pytest.mark.parametrize("name", STAND_INS)
def test_layout_equals_a_real_state(name: str) -> None:
    """On the CPU the package keeps the same state, and two tables of 256 values."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    parameters = [nn.Parameter(torch.ones(size)) for size in (100, 4095, 4096, 10_000)]
    real = getattr(bitsandbytes.optim, name)(parameters)
    made = STAND_INS[name](parameters)
    for number, parameter in enumerate(parameters):
        real.init_state(real.param_groups[0], parameter, 0, number)
        state = {k: v for k, v in real.state[parameter].items() if isinstance(v, torch.Tensor)}
        ours = made.state_of(parameter)
        known = {k: v.nbytes for k, v in state.items() if not k.startswith("qmap")}
        assert {k: v.nbytes for k, v in ours.items()} == known
