"""Train with the reads of values that programs make, and write the shapes that masks and repeats give."""

import json
import sys
from pathlib import Path

import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler()
known = torch.arange(32) % 4
while True:
    x = torch.randn(32, 64, device="cuda")
    loss = model(x).square().mean()
    assert torch.isfinite(loss), "a loss that is not finite"
    assert torch.isfinite(model.weight).all().item()
    assert not torch.isnan(loss)
    assert torch.allclose(x, x + 1)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    torch.linalg.eig(torch.randn(8, 8, device="cuda"))
    shapes = {
        "repeats": torch.repeat_interleave(x, known.cuda(), dim=0),
        "mask": x[(known == 0).cuda()],
        "computed repeats": torch.repeat_interleave(x, (x[:, 0] * 3).long(), dim=0),  # repeats
        "computed mask": x[x[:, 0] > 0],  # mask
    }
    Path(sys.argv[1]).write_text(json.dumps({name: len(value) for name, value in shapes.items()}))
