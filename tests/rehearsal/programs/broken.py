"""Fail at once, ask for a second GPU, or wait for ever before PyTorch is imported."""

import sys
import time

if "how=error" in sys.argv:
    raise ValueError("no\n such file")  # error
if "how=device" in sys.argv:
    import torch

    torch.nn.Linear(8, 8).to("cuda:1")  # device
while True:
    time.sleep(0.1)  # hang
