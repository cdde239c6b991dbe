"""Trains a little BERT with transformers' Trainer on batches of many lengths, and says what came out.

First as it is, then by the lines of docs/frameworks.md, with a pool that plans whenever a step has ended.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import mempool.torch

STEPS, ACCUMULATED = 48, 2
PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
_TWO = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([one["input_ids"] for one in samples], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([one["labels"] for one in samples]),
    }


class Steps(TrainerCallback):
    """Counts the real steps of an optimizer, and gives the planner its turn after each."""

    def __init__(self) -> None:
        self.steps = 0
        self.outcomes: list[dict[str, int]] = []

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.steps += 1

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if (pool := mempool.torch.installed()) is not None:
            pool.plan_now()
            self.outcomes.append(dict(pool.client.stats()["outcomes"]))


def trained(train: Any) -> dict[str, Any]:
    """``train(given)`` makes a trainer of what a program has, and trains."""
    set_seed(0)
    chance = random.Random(0)
    data = [
        {"input_ids": torch.randint(1, 200, (chance.randint(8, 64),)), "labels": chance.randint(0, 1)}
        for _ in range(200)
    ]
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=ACCUMULATED,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        model = BertForSequenceClassification(BertConfig(vocab_size=200, **_TWO))
        given = {"model": model, "arguments": arguments, "data": data, "collate": collate}
        trainer = train(given, steps)
    pool = mempool.torch.installed()
    said = {
        "losses": [float(one["loss"]).hex() for one in trainer.state.log_history if "loss" in one],
        "parameters": hashlib.sha256(
            b"".join(one.detach().numpy().tobytes() for one in model.parameters())
        ).hexdigest(),
        "steps": steps.steps,
        "outcomes": steps.outcomes,
        "iterations": None if pool is None else pool.report().to_dict()["iterations"],
    }
    if pool is not None:
        pool.close()
    return said


def plainly(given: dict[str, Any], steps: Steps) -> Trainer:
    trainer = Trainer(
        model=given["model"],
        args=given["arguments"],
        train_dataset=given["data"],
        data_collator=given["collate"],
        callbacks=[steps],
    )
    trainer.train()
    return trainer


def as_on_the_page(given: dict[str, Any], steps: Steps) -> Trainer:
    """Trainer is here one that has the other callback, too; the pool one that plans when it is told to."""
    example = r"```python\n([^`]*\ntrainer = Trainer\([^`]*)```"
    (code,) = re.findall(example, PAGE.read_text())
    init, install = Trainer.__init__, mempool.torch.install

    def made(self: Trainer, *args: Any, callbacks: list[TrainerCallback], **options: Any) -> None:
        init(self, *args, callbacks=[*callbacks, steps], **options)

    Trainer.__init__ = made
    mempool.torch.install = functools.partial(install, device="cpu", background=False)
    exec(code, given)
    return given["trainer"]


print(json.dumps({"plain": trained(plainly), "pooled": trained(as_on_the_page)}))
