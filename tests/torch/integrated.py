"""Train by a framework with the callback of `mempool.torch.integrations`; print logged numbers and counters.

`python integrated.py transformers|lightning|accelerate`: without and with the callback.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

import mempool.torch

T = TypeVar("T")
STEPS = 48
PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
EXAMPLE = r"```python\n([^`]*\ntrainer = Trainer\([^`]*)```"


class Run:
    """Results of a training: logged numbers, phases, and a digest of the parameters."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)
        )
        self.data = torch.utils.data.TensorDataset(torch.randn(8 * STEPS, 64))
        self.logged: list[dict[str, Any]] = []
        self.dynamic: list[bool] = []  # for each evaluated batch: all its allocations follow no plan
        self.evaluating = Counter[str]()  # outcomes of the allocations of all evaluated batches

    def watched(self, forward: Callable[[], T]) -> T:
        """Return the result of a forward pass; note whether an evaluation's allocations follow no plan."""
        pool = mempool.torch.installed()
        before = Counter(pool.client.stats()["outcomes"] if pool else {})
        result = forward()
        if pool and not torch.is_grad_enabled():
            new = Counter(pool.client.stats()["outcomes"]) - before
            self.evaluating += new
            self.dynamic.append(new["out_of_iteration"] == new.total() > 0)
        return result

    def evaluated(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return self.watched(lambda: (self.model(x) - x).square().mean())

    def said(self, watcher: Any) -> dict[str, Any]:
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in self.model.parameters()))
        losses = [float(log["loss"]).hex() for log in self.logged if "loss" in log]
        said = {"parameters": digest.hexdigest(), "losses": losses, "logged": self.logged}
        if watcher is not None:
            pool = watcher.pool
            said |= {"iterations": pool.report().to_dict()["iterations"], "dynamic": self.dynamic}
            said |= {"phase": watcher.phase, "metrics": pool.metrics()}
            pool.close()
        return said


def transformers(*, pooled: bool) -> dict[str, Any]:
    """Train a small BERT on batches of many lengths, with the pool used as in the documentation."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from mempool.torch.integrations.transformers import PoolCallback

    outcomes: list[dict[str, int]] = []  # of the allocations of the training, at the end of each step

    class Logger(TrainerCallback):
        """A logging callback like those of TensorBoard and W&B, which run before the user's callbacks."""

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            run.logged.append(dict(logs))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if (pool := mempool.torch.installed()) is not None:
                pool.plan_now()
                outcomes.append(Counter(pool.client.stats()["outcomes"]) - run.evaluating)

    class Model(BertForSequenceClassification):
        def forward(self, **batch: Any) -> Any:
            return run.watched(lambda: super(Model, self).forward(**batch))

    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = torch.nn.utils.rnn.pad_sequence([one["input_ids"] for one in samples], batch_first=True)
        labels = torch.tensor([one["labels"] for one in samples])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}

    torch.manual_seed(0)
    chance = random.Random(0)
    data = [
        {"input_ids": torch.randint(1, 200, (chance.randint(8, 64),)), "labels": chance.randint(0, 1)}
        for _ in range(200)
    ]
    two = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    run = Run(Model(BertConfig(vocab_size=200, **two)))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=8,
            per_device_eval_batch_size=32,
            remove_unused_columns=False,
        )
        init = Trainer.__init__

        def with_logger(self: Trainer, *args: Any, callbacks: Any = (), **options: Any) -> None:
            init(self, *args, callbacks=[Logger(), *callbacks], eval_dataset=data[:64], **options)

        Trainer.__init__ = with_logger
        given = {"model": run.model, "arguments": arguments, "data": data, "collate": collate}
        if pooled:
            mempool.torch.install = functools.partial(mempool.torch.install, device="cpu", background=False)
            (code,) = re.findall(EXAMPLE, PAGE.read_text())
            exec(code, given)
            trainer = given["trainer"]
        else:
            trainer = Trainer(run.model, arguments, collate, data)
            trainer.train()
        Trainer.__init__ = init
    watchers = [one.watcher for one in trainer.callback_handler.callbacks if isinstance(one, PoolCallback)]
    history = "mempool/steps" in trainer.state.log_history[0]
    return run.said(next(iter(watchers), None)) | {"history": history, "outcomes": outcomes}


def lightning(*, pooled: bool) -> dict[str, Any]:
    import lightning
    from lightning.pytorch.loggers.logger import DummyLogger

    from mempool.torch.integrations.lightning import PoolCallback

    run = Run()

    class Logger(DummyLogger):
        def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
            run.logged.append({**metrics, "step": step})

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return run.evaluated(batch[0])

        def validation_step(self, batch: Any, _: int) -> None:
            run.evaluated(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    batches = torch.utils.data.DataLoader(run.data, batch_size=8)
    callbacks = [PoolCallback(device="cpu")] if pooled else []
    with tempfile.TemporaryDirectory() as folder:
        lightning.Trainer(
            max_epochs=1,
            val_check_interval=8,
            accelerator="cpu",
            logger=[Logger()],
            log_every_n_steps=4,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
            default_root_dir=folder,
        ).fit(Module(), batches, batches)
    return run.said(callbacks[0].watcher if pooled else None)


def accelerate(*, pooled: bool) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    from mempool.torch.integrations.accelerate import PoolTracker

    run = Run()

    class Logger(GeneralTracker):
        name, requires_logging_directory, tracker = "logger", False, None

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            run.logged.append({**values, "step": step})

    accelerator = Accelerator(log_with=[Logger()], gradient_accumulation_steps=2, cpu=True)
    model, optimizer, batches = accelerator.prepare(
        run.model,
        torch.optim.Adam(run.model.parameters()),
        torch.utils.data.DataLoader(run.data, batch_size=4),
    )
    accelerator.init_trackers("run")
    tracker = PoolTracker(accelerator, optimizer, device="cpu") if pooled else None
    for number, (x,) in enumerate(batches):
        with accelerator.accumulate(model):
            accelerator.backward(run.evaluated(x))
            optimizer.step()
            optimizer.zero_grad()
        if number % 8 == 7:
            accelerator.log({"number": number}, step=number)
        if tracker is not None and number % 16 == 15:
            with tracker.phase("evaluation"), torch.no_grad():
                assert tracker.watcher.phase == "evaluation"
                run.evaluated(x)
    accelerator.end_training()
    return run.said(tracker and tracker.watcher)


if __name__ == "__main__":
    train = {"transformers": transformers, "lightning": lightning, "accelerate": accelerate}[sys.argv[1]]
    print(json.dumps({"plain": train(pooled=False), "pooled": train(pooled=True)}))
