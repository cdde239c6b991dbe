"""Programs within a limit whose schedules are followed in C++."""

from __future__ import annotations

import itertools
import os
import random
import threading
from typing import TYPE_CHECKING, Any

import torch

import mempool.torch

if TYPE_CHECKING:
    from collections.abc import Callable

ELEMENTS, COUNT = 1 << 14, 12  #: of the tensors of `Tensors`
BYTES = 4 * ELEMENTS
LIMIT = BYTES * (COUNT - 4) + BYTES // 2  #: within which some of the tensors are offloaded


class Tensors:
    """A loop over tensors of one shape, some of them offloaded, with the values that they must have."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.values = [float(number + 1) for number in range(COUNT)]
        self.tensors = [torch.full((ELEMENTS,), value) for value in self.values]

    def check(self, tensor: torch.Tensor, value: float) -> None:
        assert (tensor[0].item(), tensor[-1].item()) == (value, value)

    def iterate(self, order: list[int], count: int = COUNT) -> None:
        """Read and write the first `count` tensors in an order; operations and shapes are always the same."""
        for one, other in itertools.islice(zip(order, order[1:] + order[:1], strict=True), count):
            sums = self.tensors[one] + self.tensors[other]
            self.check(sums, self.values[one] + self.values[other])
            self.tensors[one].mul_(-1)
            self.values[one] *= -1
            self.check(self.tensors[one], self.values[one])

    def shuffled(self) -> list[int]:
        return self.random.sample(range(COUNT), COUNT)


def mode_of(pool: mempool.torch.TensorPool) -> Any:
    assert pool.offloading is not None
    return pool.offloading.mode


def iterate(pool: mempool.torch.TensorPool, work: Callable[[], None], times: int) -> None:
    for _ in range(times):
        work()
        pool.step()
        pool.plan_now()


def settle(pool: mempool.torch.TensorPool, work: Callable[[], None]) -> None:
    """Repeat an iteration until the mode sees none of its operations."""
    for _ in range(80):
        iterate(pool, work, 1)
        if mode_of(pool).follower.is_following:
            return
    raise AssertionError("no schedule is followed")


def swapping(pool: mempool.torch.TensorPool) -> dict[str, Any]:
    values: dict[str, Any] = pool.report().to_dict()["swapping"]
    return values


def unseen_operations(pool: mempool.torch.TensorPool, work: Callable[[], None]) -> int:
    """Run an iteration; return the number of operations unseen by the mode."""
    before = swapping(pool)["followed"]
    iterate(pool, work, 1)
    return int(swapping(pool)["followed"] - before)


class Network:
    """Training of a small network, whose steps an event may disturb."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        width = 128
        self.model = torch.nn.Sequential(
            *(part for _ in range(5) for part in (torch.nn.Linear(width, width), torch.nn.Tanh()))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.batch = torch.randn(256, width)
        self.losses: list[float] = []

    def disturb(self, event: str, hidden: torch.Tensor) -> None:
        """Use tensors that may be offloaded where the schedule expects no use."""
        weights = [*self.model.parameters()]
        if event == "threads":  # nothing sees the first operation of a thread
            for tensor in [one.data for one in (hidden, *weights)]:
                thread = threading.Thread(target=tensor.mul_, args=(1.01,))
                thread.start()
                thread.join()
        elif event == "thread":
            thread = threading.Thread(target=lambda: [one.sum() for one in (hidden, *weights)])
            thread.start()
            thread.join()
        elif event == "numpy":
            assert hidden.detach().numpy().sum() + sum(one.detach().numpy().sum() for one in weights) != 0
        elif event == "evaluation":
            with torch.no_grad():
                self.model(self.batch[:7])
        elif event == "fork":
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)

    def step(self, event: str = "", place: int = 0) -> None:
        """Train one step with an event between the layers (place 0) or between the passes (place 1)."""
        hidden = self.model[:4](self.batch)
        if place == 0:
            self.disturb(event, hidden)
        loss = self.model[4:](hidden).square().mean()
        if place == 1:
            self.disturb(event, hidden)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
