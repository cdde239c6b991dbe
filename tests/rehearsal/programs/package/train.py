"""Ask for more than a device has in the second step; go on without, if told to catch the error."""

import sys

import torch

weight = torch.nn.Parameter(torch.zeros(1024, device="cuda"))
optimizer = torch.optim.SGD([weight])
kept = []
for step in range(1, 10):
    try:
        if step == 2:
            kept.append(torch.empty(20 << 30, dtype=torch.uint8, device="cuda"))  # too much
    except torch.OutOfMemoryError:
        if "how=caught" not in sys.argv:
            raise
    weight.sum().backward()
    optimizer.step()
