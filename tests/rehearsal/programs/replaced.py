"""Replace the process by another run of the program, share a tensor with a child process, and train."""

import os
import sys

if "REPLACED" not in os.environ:
    os.environ["REPLACED"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])

import torch
import torch.multiprocessing as processes


def receive(queue: processes.Queue, done: processes.Event) -> None:
    tensor = queue.get()
    assert (tensor.shape, tensor.is_cuda) == ((1 << 20,), True)
    del tensor
    done.set()


def main() -> None:
    context = processes.get_context("spawn")
    queue, done = context.Queue(), context.Event()
    child = context.Process(target=receive, args=(queue, done))
    child.start()
    tensor = torch.ones(1 << 20, device="cuda")
    queue.put(tensor)
    assert done.wait(100)
    child.join()
    assert child.exitcode == 0
    optimizer = torch.optim.SGD([torch.ones(64, device="cuda", requires_grad=True)])
    while True:
        optimizer.step()


if __name__ == "__main__":
    main()
