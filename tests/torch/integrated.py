"""Trains by a framework with the callback of `mempool.torch.integrations`; says what was logged and counted.

`python integrated.py transformers|lightning|accelerate`: without and with the callback.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from typing import Any

import torch

import mempool.torch

STEPS = 24


class Run:
    """A training that keeps the numbers that its logger got, its phases, and a digest of its parameters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
        self.data = torch.utils.data.TensorDataset(torch.randn(8 * STEPS, 64))
        self.logged: list[dict[str, Any]] = []
        self.dynamic: list[int] = []  # allocations outside the plan in each evaluation

    def evaluated(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss; note whether its allocations follow no plan."""
        pool = mempool.torch.installed()
        before = pool.client.stats()["outcomes"] if pool else {}
        loss = (self.model(x) - x).square().mean()
        if pool and not torch.is_grad_enabled():
            after = pool.client.stats()["outcomes"]
            new = {key: after[key] - before[key] for key in after}
            self.dynamic.append(new["out_of_iteration"] == sum(new.values()) > 0)
        return loss

    def said(self, watcher: Any) -> dict[str, Any]:
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in self.model.parameters()))
        said: dict[str, Any] = {"parameters": digest.hexdigest(), "logged": self.logged}
        if watcher is not None:
            pool = watcher.pool
            said |= {"iterations": pool.report().to_dict()["iterations"], "dynamic": self.dynamic}
            said |= {"phase": watcher.phase, "metrics": pool.metrics()}
            pool.close()
        return said


def transformers(*, pooled: bool) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from mempool.torch.integrations.transformers import PoolCallback

    run = Run()

    class Logger(TrainerCallback):
        """As those of TensorBoard and W&B, before the callbacks of the user."""

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            run.logged.append(dict(logs))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = run.model

        def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, Any]:
            return {"loss": run.evaluated(x), "out": x.mean(1)}

    def collate(rows: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack([row[0] for row in rows]), "labels": torch.zeros(len(rows))}

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
            logging_steps=4,
            eval_strategy="steps",
            eval_steps=8,
            per_device_eval_batch_size=32,
            remove_unused_columns=False,
            logging_strategy="steps",
        )
        callbacks = [PoolCallback(device="cpu")] if pooled else []
        trainer = Trainer(Model(), arguments, collate, run.data, run.data, callbacks=[Logger(), *callbacks])
        trainer.train()
        if pooled:  # an evaluation that the program asks for begins unseen
            run.dynamic.append(all(run.dynamic))
    return run.said(callbacks[0].watcher if pooled else None) | {
        "history": "mempool/steps" in trainer.state.log_history[0]
    }


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
