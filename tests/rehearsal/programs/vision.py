"""Train a convolutional network with workers, pinned memory, AMP, and checkpoints of both kinds."""

import os
import subprocess
import sys

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    assert "GPU 0: NVIDIA H100" in os.popen("nvidia-smi -L").read()
    images = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))
    loader = DataLoader(images, batch_size=8, num_workers=1, pin_memory=True, shuffle=True)
    stem = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.BatchNorm2d(64)).cuda()
    body = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.ReLU()).cuda()
    head = torch.nn.Sequential(
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10)
    ).cuda()
    model = torch.nn.ModuleList([stem, body, head])
    optimizer, scaler = torch.optim.SGD(model.parameters(), momentum=0.9), torch.amp.GradScaler("cuda")
    for _ in range(3):
        for image, label in loader:
            assert image.is_pinned()
            with torch.autocast("cuda", torch.float16):
                middle = checkpoint(body, stem(image.cuda(non_blocking=True)), use_reentrant=False)
                loss = torch.nn.functional.cross_entropy(head(middle), label.cuda(non_blocking=True))
            os.makedirs("out/checkpoint-1", exist_ok=True)  # noqa: PTH103
            with open("out/checkpoint-1/trainer_state.json", "w") as file:  # noqa: PTH123
                file.write("{}")
            torch.save({"model": model.state_dict()}, "last.pt.new")
            os.replace("last.pt.new", "last.pt")  # noqa: PTH105 - as programs do
            assert torch.load("last.pt")["model"].keys() == model.state_dict().keys()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
