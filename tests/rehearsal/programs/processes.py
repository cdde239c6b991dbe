"""Processes that train on one GPU, started by the named method of multiprocessing, or as a script."""

import subprocess
import sys

import torch


def train(rank, size):
    layer = torch.nn.Linear(size, size, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(10_000):
        layer(torch.ones(8, size, device="cuda")).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    how, size = sys.argv[1].removeprefix("how="), int(sys.argv[2])
    if how == "script":
        subprocess.run([sys.executable, __file__, "how=alone", str(size)], check=True)
    elif how == "alone":
        train(0, size)
    else:
        torch.multiprocessing.start_processes(train, (size,), nprocs=2, start_method=how)
