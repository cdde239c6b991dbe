"""Two processes that train on one GPU, started by the named method of multiprocessing."""

import sys

import torch


def train(rank, size):
    layer = torch.nn.Linear(size, size, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    while True:
        layer(torch.ones(8, size, device="cuda")).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    how, size = sys.argv[1:]
    torch.multiprocessing.start_processes(train, (int(size),), nprocs=2, start_method=how)
