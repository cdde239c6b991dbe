"""Rehearse ten kinds of training programs, written as their users write them.

    python tests/benchmarks/framework_programs.py --cuda PYTHON [--only PROGRAM ...]

PYTHON has a CUDA build of PyTorch, and rehearses; the Python that runs this script has a build for the CPU,
on which `mempool fit --main` predicts the peak, and a run of the same program is recorded. Both have the
libraries that a program imports; no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
WORDS = 8000
TEXT = {"n_embd": 512, "n_head": 8, "vocab_size": WORDS, "n_positions": 256}  #: of a GPT-2
MIB = 1 << 20


class Block(nn.Module):
    """A layer as in nanoGPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to earlier words."""
        q, k, v = self.c_attn(self.ln_1(x)).unflatten(-1, (3, 6, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


def nanogpt() -> None:
    """Accumulate gradients in float16, clip them, decay the rate, save the best."""
    model = nn.Sequential(
        nn.Embedding(WORDS, 384), *(Block(384) for _ in range(6)), nn.LayerNorm(384), nn.Linear(384, WORDS)
    ).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=GPU)
    scaler, best = torch.amp.GradScaler(DEVICE, enabled=GPU), math.inf
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * (1 + math.cos(math.pi * step / 4))
        for _ in range(2):
            text = torch.randint(WORDS, (8, 257)).to(DEVICE)
            with torch.autocast(DEVICE, torch.float16, enabled=GPU):
                loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if loss.item() < best:
            best = loss.item()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "ckpt.pt")


def trainer() -> None:
    """Train a GPT-2 by transformers' Trainer in bfloat16 with gradient checkpointing."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(WORDS, (64, 256))]
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=8,
        max_steps=4,
        bf16=GPU,
        gradient_checkpointing=True,
        logging_steps=1,
        save_steps=2,
        report_to=[],
    )
    Trainer(GPT2LMHeadModel(GPT2Config(n_layer=4, **TEXT)), arguments, train_dataset=texts).train()


def accelerate() -> None:
    """Train timm's ResNet-50 by accelerate in float16, with workers and page-locked memory."""
    import timm
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="fp16" if GPU else "no")
    model = timm.create_model("resnet50", num_classes=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(32, 3, 128, 128), torch.randint(100, (32,)))
    loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2, pin_memory=GPU)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for pictures, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(pictures), labels))
        optimizer.step()


def lightning() -> None:
    """Train a perceptron by Lightning in bfloat16, with a validation."""
    from lightning import LightningModule, Trainer

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = (nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU())
            self.net = nn.Sequential(*layers, nn.Linear(2048, 10))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    data = TensorDataset(torch.randn(1024, 1, 28, 28), torch.randint(10, (1024,)))
    fitting = Trainer(max_epochs=1, precision="bf16-mixed" if GPU else 32, logger=False, devices=1)
    fitting.fit(Classifier(), DataLoader(data, 256), DataLoader(data, 256))


def lora() -> None:
    """Finetune a GPT-2 with peft's LoRA."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn"], task_type="CAUSAL_LM")
    model = get_peft_model(GPT2LMHeadModel(GPT2Config(n_layer=6, **TEXT)), adapters).to(DEVICE)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-4)
    for _ in range(4):
        text = torch.randint(WORDS, (4, 256), device=DEVICE)
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())
    model.save_pretrained("adapter")


def diffusion() -> None:
    """Let a U-Net of diffusers predict noise."""
    from diffusers import DDPMScheduler, UNet2DModel

    blocks = [f"{kind}Block2D" for kind in ("Down", "AttnDown", "Down", "Up", "AttnUp", "Up")]
    model = UNet2DModel(
        32, 3, 3, block_out_channels=(64, 128, 256), down_block_types=blocks[:3], up_block_types=blocks[3:]
    )
    model, scheduler = model.to(DEVICE), DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(4):
        clean, times = torch.randn(4, 3, 32, 32, device=DEVICE), torch.randint(1000, (4,), device=DEVICE)
        noise = torch.randn_like(clean)
        F.mse_loss(model(scheduler.add_noise(clean, noise, times), times).sample, noise).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def vit() -> None:
    """Train timm's vision transformer with an average of its weights and a schedule."""
    import timm
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV2

    model = timm.create_model("vit_tiny_patch16_224", num_classes=10).to(DEVICE)
    average, optimizer = ModelEmaV2(model, decay=0.999), torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = CosineLRScheduler(optimizer, t_initial=10)
    for step in range(4):
        pictures = torch.randn(8, 3, 224, 224, device=DEVICE)
        loss = F.cross_entropy(model(pictures), torch.randint(10, (8,), device=DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
        scheduler.step(step)


def gan() -> None:
    """Train two networks under DataParallel, the generator in every second step."""

    def network(*sizes: int) -> Any:
        layers = (nn.Linear(sizes[0], sizes[1]), nn.LeakyReLU(0.2), nn.Linear(sizes[1], sizes[2]))
        net = nn.DataParallel(nn.Sequential(*layers)).to(DEVICE)
        return net, torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999))

    (generator, of_generator), (critic, of_critic) = network(128, 1024, 3072), network(3072, 1024, 1)
    for step in range(8):
        real, fake = torch.rand(256, 3072, device=DEVICE), generator(torch.randn(256, 128, device=DEVICE))
        loss = critic(fake.detach()).mean() - critic(real).mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        if step % 2 == 1:
            of_generator.zero_grad()
            (-critic(fake).mean()).backward()
            of_generator.step()


def join_ranks() -> torch.device:
    """Join the process group as the launcher's environment says."""
    dist.init_process_group("nccl" if GPU else "gloo")
    if GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device(DEVICE, int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")


def ddp() -> None:
    """Train a checkpointed encoder under DistributedDataParallel, with a sampler."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    class Encoder(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    device, data = join_ranks(), TensorDataset(torch.randn(128, 128, 256))
    layers = (nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(4))
    model = DistributedDataParallel(Encoder(*layers).to(device), device_ids=[device] if GPU else None)
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = DistributedSampler(data)
    for (x,) in DataLoader(data, 8, sampler=sampler, num_workers=1, pin_memory=GPU):
        optimizer.zero_grad()
        model(x.to(device, non_blocking=True)).square().mean().backward()
        optimizer.step()


def fsdp() -> None:
    """Keep a share of weights, gradients and optimizer's state on each rank, and compute in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = join_ranks()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)))
    for layer in (*model, model):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        loss = model(torch.randn(64, 1024, device=device)).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        objects = [None] * dist.get_world_size()
        dist.all_gather_object(objects, loss.item())


PROGRAMS = {
    f.__name__: f for f in (nanogpt, trainer, accelerate, lightning, lora, diffusion, vit, gan, ddp, fsdp)
}
RANKS = ("ddp", "fsdp")  #: programs of several processes, of which the table has one
ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29577",
}


def answer(python: str, *arguments: str, **environment: str) -> Any:
    """Return the JSON answer of a command of mempool, or None if it has none."""
    command = [python, "-m", "mempool", *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    try:
        return json.loads(done.stdout)
    except ValueError:
        return None


def main() -> None:
    """Run one program, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--cuda", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--run", choices=PROGRAMS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.run is not None:
        PROGRAMS[chosen.run]()
        return
    print("| program | steps | allocated, MiB | reserved | without workspaces | fit | recorded on a CPU |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    script = str(Path(__file__).resolve())
    for name in chosen.only:
        ranks = ("--ranks", "4") if name in RANKS else ()
        alone = ALONE if name in RANKS else {}
        program = (script, "--run", name)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            rehearsal = (chosen.cuda, "rehearse", "--json", *ranks, *program)
            full, bare = answer(*rehearsal), answer(*rehearsal, CUBLAS_WORKSPACE_CONFIG=":0:0")
            fit = answer(sys.executable, "fit", "--main", "--json", script, "--", "--run", name)
            answer(sys.executable, "run", "--fresh", "--record", "run.trace", *program, **alone)
            recorded = answer(sys.executable, "info", "--json", "run.trace")
            cells = [full["peak_allocated_bytes"], full["peak_reserved_bytes"], bare["peak_allocated_bytes"]]
            cells += [fit and fit["peak_bytes"], recorded and recorded["peak_load_bytes"]]
            sizes = [f"{cell / MIB:,.1f}" if cell else "-" for cell in cells]
            print(f"| {name} | {full['steps']} |", " | ".join(sizes), "|", flush=True)


if __name__ == "__main__":
    main()
