"""Train a network without and with `torch.compile`; write the peaks, and the bytes of steps' requests."""

import json
import sys
from pathlib import Path

import torch
from torch import nn


class Network(nn.Module):
    """The width is odd: PyTorch's compiler pads the multiplication."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.LayerNorm(2048))
        self.outer = nn.Linear(2048, 5001)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nine = torch.full((), 9.0, device="cuda")  # the compiler computes its root
        return nn.functional.cross_entropy(self.outer(self.inner(x)) * nine.sqrt(), targets)


model, report = Network().to("cuda"), {}
optimizer = torch.optim.AdamW(model.parameters())
for name, network in {"eager": model, "compiled": torch.compile(model)}.items():
    requests = []
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
        with torch.autocast("cuda", torch.bfloat16):
            loss = network(torch.randn(4096, 512, device="cuda"), torch.zeros(4096, dtype=int, device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        requests.append(torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - before)
    report[name] = {"peak": torch.cuda.max_memory_allocated(), "first": requests[0], "last": requests[-1]}
Path(sys.argv[1]).write_text(json.dumps(report))
