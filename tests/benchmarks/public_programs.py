"""Time and memory of public kinds of training programs, under plain Python and under `mempool run`.

    python tests/benchmarks/public_programs.py [--only PROGRAM ...] [--rounds 3] [--json FILE]

Each program trains as its public authors do (the sources are named at each function), on random data and
without any call of the pool. Runs of both ways alternate. Per step: seconds of the clock and processor
seconds of the process, medians of the second half of the steps; per run: the peak of resident memory, a
digest of losses and parameters. The table shows medians over the rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
from workloads import Layer

STEPS = 60


class Laps:
    """Times of steps and a digest of what a program computes."""

    def __init__(self) -> None:
        self.laps: list[tuple[float, float]] = []
        self._digest = hashlib.sha256()
        self._then = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def lap(self, loss: torch.Tensor | float) -> None:
        """End a step with this loss."""
        self._digest.update(float(loss).hex().encode())
        now = self._now()
        self.laps.append((now[0] - self._then[0], now[1] - self._then[1]))
        self._then = now

    def said(self, model: nn.Module) -> dict[str, Any]:
        for parameter in model.parameters():
            self._digest.update(parameter.detach().numpy().tobytes())
        half = self.laps[len(self.laps) // 2 :]
        return {
            "wall_ms": 1e3 * statistics.median(lap[0] for lap in half),
            "cpu_ms": 1e3 * statistics.median(lap[1] for lap in half),
            "all_cpu_s": sum(lap[1] for lap in self.laps),
            "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
            "digest": self._digest.hexdigest(),
        }


class GPT(nn.Module):
    def __init__(self, vocabulary: int, block: int, width: int, layers: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.h = nn.ModuleList(Layer(width, 4) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[Any, Any]:
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def nanogpt(laps: Laps) -> nn.Module:
    """Run karpathy/nanoGPT's train.py: accumulation over two batches, clipping, evaluation now and then."""
    data = torch.randint(65, (20_000,))
    model = GPT(65, 64, 128, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.randint(len(data) - 64, (12,))
        return torch.stack([data[i : i + 64] for i in at]), torch.stack([data[i + 1 : i + 65] for i in at])

    @torch.no_grad()
    def estimate() -> float:
        model.eval()
        loss = torch.tensor([model(*batch())[1].item() for _ in range(10)]).mean().item()
        model.train()
        return loss

    for step in range(STEPS):
        if step % 25 == 0:
            estimate()
        for _ in range(2):
            loss = model(*batch())[1] / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        laps.lap(loss.item())
    return model


def mingpt(laps: Laps) -> nn.Module:
    """Run karpathy/minGPT's demo: sort numbers, a data loader, clipping."""
    model = GPT(3, 11, 48, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95))
    rows = torch.randint(3, (4096, 6))
    both = torch.cat([rows, rows.sort(1).values], 1)
    x, y = both[:, :-1], both[:, 1:].clone()
    y[:, :5] = -1
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64, shuffle=True)
    for _ in range(4):
        for ids, targets in loader:
            _, loss = model(ids, targets)
            model.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            laps.lap(loss.item())
    return model


def word_language_model(laps: Laps) -> nn.Module:
    """Run pytorch/examples' word_language_model: truncated backpropagation, SGD written by hand."""
    words, width, length = 2000, 100, 35
    encoder, rnn, decoder = nn.Embedding(words, width), nn.LSTM(width, width, 2), nn.Linear(width, words)
    model = nn.ModuleList([encoder, rnn, decoder])
    text = torch.randint(words, (length * STEPS + 1, 20))
    hidden = (torch.zeros(2, 20, width), torch.zeros(2, 20, width))
    for at in range(0, len(text) - 1, length):
        model.zero_grad()
        hidden = tuple(state.detach() for state in hidden)
        out, hidden = rnn(encoder(text[at : at + length]), hidden)
        loss = F.cross_entropy(decoder(out).view(-1, words), text[at + 1 : at + 1 + length].view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-1.0)
        laps.lap(loss.item())
    return model


def time_sequence_prediction(laps: Laps) -> nn.Module:
    """Run pytorch/examples' time_sequence_prediction: LBFGS over LSTM cells stepped in Python, a forecast."""
    torch.set_default_dtype(torch.float64)

    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 51), nn.LSTMCell(51, 51), nn.Linear(51, 1)

        def forward(self, x: torch.Tensor, future: int = 0) -> torch.Tensor:
            outputs = []
            h, c, h2, c2 = (torch.zeros(x.size(0), 51) for _ in range(4))
            for one in x.split(1, 1):
                h, c = self.lstm1(one, (h, c))
                h2, c2 = self.lstm2(h, (h2, c2))
                outputs.append(self.linear(h2))
            for _ in range(future):
                h, c = self.lstm1(outputs[-1], (h, c))
                h2, c2 = self.lstm2(h, (h2, c2))
                outputs.append(self.linear(h2))
            return torch.cat(outputs, 1)

    x = torch.sin(torch.arange(180.0)[None] / 20 + torch.rand(21, 1) * 6)
    model = Sequence()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8)
    for _ in range(4):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[:, :-1]), x[:, 1:])
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        with torch.no_grad():
            model(x[:3], future=500)
        laps.lap(loss.item())
    return model


def vae(laps: Laps) -> nn.Module:
    """Run pytorch/examples' vae."""
    model = nn.ModuleDict(
        {
            "fc1": nn.Linear(784, 400),
            "mu": nn.Linear(400, 20),
            "var": nn.Linear(400, 20),
            "fc3": nn.Linear(20, 400),
            "fc4": nn.Linear(400, 784),
        }
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(5 * STEPS):
        x = torch.rand(128, 784)
        optimizer.zero_grad()
        h = F.relu(model["fc1"](x))
        mu, logvar = model["mu"](h), model["var"](h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        out = torch.sigmoid(model["fc4"](F.relu(model["fc3"](z))))
        loss = F.binary_cross_entropy(out, x, reduction="sum")
        loss = loss - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        loss.backward()
        optimizer.step()
        laps.lap(loss.item())
    return model


def reinforce(laps: Laps) -> nn.Module:
    """Run pytorch/examples' reinforcement_learning: one action a forward pass, episodes of any length."""
    model = nn.Sequential(nn.Linear(4, 128), nn.Dropout(0.6), nn.ReLU(), nn.Linear(128, 2), nn.Softmax(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        log_probs, rewards = [], []
        for _ in range(random.randint(10, 200)):
            chosen = torch.distributions.Categorical(model(torch.randn(1, 4)))
            action = chosen.sample()
            log_probs.append(chosen.log_prob(action))
            rewards.append(float(action.item()))
        returns, total = [], 0.0
        for reward in reversed(rewards):
            total = reward + 0.99 * total
            returns.insert(0, total)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-7)
        optimizer.zero_grad()
        loss = torch.cat([-p * r for p, r in zip(log_probs, returns, strict=True)]).sum()
        loss.backward()
        optimizer.step()
        laps.lap(loss.item())
    return model


def averaged(model: nn.Module) -> torch.optim.swa_utils.AveragedModel:
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    return torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)


class Basic(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width))
        self.two = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width))
        self.skip = nn.Conv2d(before, width, 1, stride, bias=False) if stride != 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.two(F.relu(self.one(x))) + self.skip(x))


def resnet(laps: Laps) -> nn.Module:
    """Run timm's train.py kind: a residual network, SGD with momentum, EMA, one shorter batch an epoch."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        Basic(32, 32, 1),
        Basic(32, 64, 2),
        Basic(64, 128, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    ema = averaged(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    data = torch.utils.data.TensorDataset(torch.randn(300, 3, 32, 32), torch.randint(10, (300,)))
    for _ in range(5):
        for x, y in torch.utils.data.DataLoader(data, batch_size=32, shuffle=True):
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update_parameters(model)
            laps.lap(loss.item())
    return model


def diffusion(laps: Laps) -> nn.Module:
    """Run diffusers' unconditional training kind: a small U-Net, noise, EMA."""

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64))
            self.enter, self.down = nn.Conv2d(3, 32, 3, 1, 1), nn.Conv2d(32, 64, 3, 2, 1)
            self.middle, self.norm = nn.Conv2d(64, 64, 3, 1, 1), nn.GroupNorm(8, 64)
            self.up, self.leave = nn.ConvTranspose2d(64, 32, 2, 2), nn.Conv2d(64, 3, 3, 1, 1)

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            angles = t[:, None].float() * torch.exp(torch.arange(16) * -math.log(1e4) / 16)
            emb = self.time(torch.cat([angles.sin(), angles.cos()], 1))
            a = F.silu(self.enter(x))
            b = F.silu(self.norm(self.middle(F.silu(self.down(a)) + emb[:, :, None, None])))
            return self.leave(torch.cat([a, self.up(b)], 1))

    model = UNet()
    ema = averaged(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
    for _ in range(STEPS):
        clean, noise, t = torch.randn(16, 3, 32, 32), torch.randn(16, 3, 32, 32), torch.randint(1000, (16,))
        a = alphas[t][:, None, None, None]
        loss = F.mse_loss(model(a.sqrt() * clean + (1 - a).sqrt() * noise, t), noise)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
        laps.lap(loss.item())
    return model


def trainer(laps: Laps) -> nn.Module:
    """Run transformers' Trainer on sentences of many lengths."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Lap(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            laps.lap(0.0)

    data = [
        {"input_ids": torch.randint(1, 500, (random.randint(8, 64),)), "labels": random.randint(0, 1)}
        for _ in range(8 * STEPS)
    ]

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
        labels = torch.tensor([row["labels"] for row in rows])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}

    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 192}
    model = BertForSequenceClassification(BertConfig(vocab_size=500, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=2 * STEPS,
            per_device_train_batch_size=4,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=50,
        )
        Trainer(
            model=model, args=arguments, train_dataset=data, data_collator=collate, callbacks=[Lap()]
        ).train()
    return model


def lightning_autoencoder(laps: Laps) -> nn.Module:
    """Run Lightning's first example: an autoencoder, with validation after each epoch."""
    import lightning

    class Autoencoder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 3))
            self.decoder = nn.Sequential(nn.Linear(3, 256), nn.ReLU(), nn.Linear(256, 784))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x = batch[0]
            return F.mse_loss(self.decoder(self.encoder(x)), x)

        def validation_step(self, batch: Any, number: int) -> torch.Tensor:
            return self.training_step(batch, number)

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            laps.lap(outputs["loss"].item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    model = Autoencoder()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(4096, 784)), batch_size=64)
    with tempfile.TemporaryDirectory() as folder:
        lightning.Trainer(
            max_epochs=4,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(model, data, data)
    return model


def grpo(laps: Laps) -> nn.Module:
    """Run trl's GRPO kind: a model generates completions of any length, then learns from their rewards."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=500, n_positions=128, n_embd=96, n_layer=3, n_head=4, eos_token_id=7, pad_token_id=0
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(STEPS // 2):
        prompt = torch.randint(8, 500, (1, random.randint(4, 12))).repeat(8, 1)
        model.eval()
        with torch.no_grad():
            most = random.randint(8, 32)
            full = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=most, do_sample=True
            )
            old = torch.log_softmax(model(full).logits[:, :-1], -1).gather(2, full[:, 1:, None]).squeeze(2)
        model.train()
        rewards = (full[:, prompt.size(1) :] < 250).float().mean(1)
        advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        new = torch.log_softmax(model(full).logits[:, :-1], -1).gather(2, full[:, 1:, None]).squeeze(2)
        ratio = torch.exp(new - old)
        loss = -torch.min(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        laps.lap(loss.item())
    return model


def navit(laps: Laps) -> nn.Module:
    """Run lucidrains/vit-pytorch's NaViT kind: a random number of pictures of random sizes in each step."""
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = nn.ModuleList([nn.Linear(192, 128), nn.TransformerEncoder(layer, 2), nn.Linear(128, 10)])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(4 * STEPS):
        pictures = [torch.randn(random.randint(4, 64), 192) for _ in range(random.randint(1, 8))]
        x = nn.utils.rnn.pad_sequence([model[0](one) for one in pictures], batch_first=True)
        loss = model[2](model[1](x).mean(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        laps.lap(loss.item())
    return model


PROGRAMS: dict[str, Callable[[Laps], nn.Module]] = {
    each.__name__: each
    for each in (
        nanogpt,
        mingpt,
        word_language_model,
        time_sequence_prediction,
        vae,
        reinforce,
        resnet,
        diffusion,
        trainer,
        lightning_autoencoder,
        grpo,
        navit,
    )
}


def alone(name: str) -> None:
    """Run one program and print its figures as JSON."""
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    laps = Laps()
    print(json.dumps(laps.said(PROGRAMS[name](laps))))


def run(name: str, *, pooled: bool) -> dict[str, Any]:
    """Return the figures of one program in a process of its own, with the pool's report if it has one."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        before = ["-m", "mempool", "run", "--fresh", "--quiet", "--json", str(report)] if pooled else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MEMPOOL_REMEMBER": ""}
        command = [sys.executable, *before, __file__, "--alone", name]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment, cwd=folder
        )
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if pooled:
            said["pool"] = json.loads(report.read_text())["pools"]["torch"]
        return said


def row(name: str, rounds: int) -> dict[str, Any]:
    """Return the medians of both ways over interleaved rounds."""
    ways: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for number in range(2 * rounds):
        pooled = number % 4 in (1, 2)  # plain, pool, pool, plain
        ways[pooled].append(run(name, pooled=pooled))
    keys = ("wall_ms", "cpu_ms", "all_cpu_s", "rss_mb", "faults")
    middle = {
        way: {key: statistics.median(one[key] for one in runs) for key in keys} for way, runs in ways.items()
    }
    pool = ways[True][-1]["pool"]
    asked = pool["hits_total"] + pool["misses_total"]
    return {
        "program": name,
        "plain": middle[False],
        "pool": middle[True],
        "identical": len({one["digest"] for runs in ways.values() for one in runs}) == 1,
        "hits": pool["hits_total"] / asked if asked else None,
        "iterations": pool["iterations"],
        "from": pool["plan_active_at_iteration"],
    }


def table(names: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    columns = ("program", "same", "ms a step, plain", "processor ms", "clock, of plain", "processor")
    columns += ("processor, all steps", "memory", "hits", "plan from")
    print("| " + " | ".join(columns) + " |")
    print("| --- " * 10 + "|", flush=True)
    for name in names:
        one = row(name, rounds)
        plain, pool = one["plain"], one["pool"]
        ratio = [f"{pool[key] / plain[key]:.3f}" for key in ("wall_ms", "cpu_ms", "all_cpu_s", "rss_mb")]
        hits = "-" if one["hits"] is None else f"{one['hits']:.1%}"
        cells = [
            name,
            str(one["identical"]),
            f"{plain['wall_ms']:.2f}",
            f"{plain['cpu_ms']:.2f}",
            *ratio,
            hits,
            f"{one['from']} of {one['iterations']}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
        yield one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", choices=PROGRAMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        alone(options.alone)
        return
    rows = list(table(options.only, options.rounds))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
