"""Train a network with AdamW; at the end, append what PyTorch itself reports to a file."""

import argparse
import json
from pathlib import Path

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--report", type=Path)
parser.add_argument("--compile", action="store_true")
given = parser.parse_args()
model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
if given.compile:
    model = torch.compile(model)
try:
    for _ in range(100):
        loss = model(torch.randn(given.batch_size, 512, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())  # the value
finally:
    reported = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    with given.report.open("a") as file:
        file.write(json.dumps(reported) + "\n")
