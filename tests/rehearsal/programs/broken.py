"""Fail at once, fail where a model is loaded, or wait for ever before PyTorch is imported."""

import sys
import time

if "how=error" in sys.argv:
    raise ValueError("no\n such file")  # error
if "how=load" in sys.argv:
    import torch

    torch.nn.Linear(8, 8).cuda()
    raise OSError("no model of this name")  # load
while True:
    time.sleep(0.1)  # hang
