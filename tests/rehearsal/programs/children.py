"""A pool of processes, a child process that fails, and one that is still there at the end."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import torch


def train(steps):
    layer = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(steps):
        layer(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
    return steps


def fail():
    torch.ones(8, device="cuda")
    raise ValueError("as planned")


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        assert pool.map(train, [6, 6]) == [6, 6]
        pool.close()
        pool.join()
    failed = context.Process(target=fail)
    failed.start()
    failed.join()
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    Path("../left.txt").write_text(str(left.pid))
