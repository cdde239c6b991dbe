"""``mempool fit`` follows a program's gradients: accumulated by a library, and cleared in each order."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import contextlib
import io

import mempool.torch

pytestmark = pytest.mark.usefixtures("shared_isolation")

TRAINER = """
import sys, torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return {"input_ids": torch.ones(32, dtype=torch.long), "labels": torch.tensor(0)}

class Own(Trainer):
    pass

config = BertConfig(
    vocab_size=99, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, gradient_accumulation_steps=int(sys.argv[1]), report_to="none",
    torch_compile=len(sys.argv) > 2)
Own(model=BertForSequenceClassification(config), args=arguments, train_dataset=Data()).train()
"""
ACCELERATE = """
import contextlib, sys, torch
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=int(sys.argv[1]))
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 64))
net, opt, data = accelerator.prepare(net, opt, torch.utils.data.DataLoader(data, batch_size=8))
for (x,) in data:
    with accelerator.accumulate(net) if "plain" not in sys.argv else contextlib.nullcontext():
        accelerator.backward((net(x) - x).square().mean())
        opt.step()
        opt.zero_grad()
"""


@pytest.mark.parametrize(
    ("library", "text"),
    [("transformers", TRAINER), ("accelerate", ACCELERATE)],
    ids=["Trainer", "accelerate"],
)
def test_accumulation_by_a_library_is_estimated(fitted: Any, library: str, text: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    once, often = fitted(text, "--", "1"), fitted(text, "--", "4")
    assert often["by_phase_bytes"] == fitted(text, "--accumulate", "4", "--", "1")["by_phase_bytes"]
    assert often["by_phase_bytes"]["forward"] > once["by_phase_bytes"]["forward"]
    note = f"of {library} lets gradients of 4 batches add up: tried with two"
    assert any(note in line for line in often["warnings"])
    assert not any("add up" in line for line in once["warnings"])
    assert once["caveats"] == often["caveats"] == []
    asked = fitted(text, "--accumulate", "1", "--", "4")
    assert asked["peak_bytes"] == once["peak_bytes"]
    assert [line for line in asked["warnings"] if "add up: tried with 1, as --accumulate says" in line]


def test_accelerator_without_accumulate_block_does_not_accumulate(fitted: Any) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    plain = fitted(ACCELERATE, "--", "4", "plain")
    assert not any("add up" in line for line in plain["warnings"])
    assert plain["peak_bytes"] == fitted(ACCELERATE, "--", "1")["peak_bytes"]


def test_compiling_trainer_gives_a_note_on_the_eager_model(fitted: Any) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert any(
        "is left out: the result is of the eager" in text
        for text in fitted(TRAINER, "--", "1", "c")["warnings"]
    )
    assert not any("left out" in text for text in fitted(TRAINER, "--", "1")["warnings"])


#: A model of 4 MiB of parameters and 1 MiB of activations.
CLEARS = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.zeros(128, 512)
for _ in range(3):
    {first}
    output = model(x)
    loss = output.square().mean()
    {late}
    loss.backward()
    optimizer.step()
    {last}
"""
NOTE = "clears gradients between forward and backward"
ORDERS = {
    "behind the step": {"last": "optimizer.zero_grad()"},
    "before the forward": {"first": "optimizer.zero_grad()"},
    "before the backward": {"late": "optimizer.zero_grad()"},
    "before the backward, by the model": {"late": "model.zero_grad()"},
    "before the backward, with zeros": {"late": "optimizer.zero_grad(set_to_none=False)"},
}


def clearing_script(**lines: str) -> str:
    return CLEARS.format(**{name: lines.get(name, "pass") for name in ("first", "late", "last")})


def real_peak(text: str) -> int:
    with mempool.torch.install(device="cpu") as pool, contextlib.redirect_stdout(io.StringIO()):
        exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
        return int(pool.report().to_dict()["requested_peak_bytes"])


@pytest.mark.parametrize("order", ORDERS)
def test_peak_and_note_follow_the_order_of_clearing(order: str, fitted: Any) -> None:
    """Predict the bytes of a real run, which differ by the parameters' 4 MiB, within 1 %."""
    text = clearing_script(**ORDERS[order])
    estimate = fitted(text, "--device", "cpu")
    assert estimate["peak_bytes"] == pytest.approx(real_peak(text), rel=0.01)
    noted = any(NOTE in note for note in estimate["warnings"])
    assert noted == (order.startswith("before the backward") and "zeros" not in order)
