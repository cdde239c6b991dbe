"""Cost of a limit that is never reached, per operation of PyTorch on the CPU.

    python tests/benchmarks/swapping_overhead.py [--rounds 8] [--large 8]

There are two programs: training steps of transformers' ResNet-50 on small pictures, so that operations are
short; and fifty additions of 64 numbers with a training step of one small linear layer. Each program runs in
four ways in turn, with one pool: without a mode, under a dispatch mode that only counts, and within a limit,
both with each operation dispatched to the mode and with operations that bypass the mode. A time is the
processor time of the best step of all rounds, with one thread; the cost is the difference to the step without
a mode, divided by the number of operations. ``--large N`` also prints the cost as a fraction of a step with N
pictures of 224 x 224.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import mempool.torch
from mempool.torch.eager.mode import OffloadMode
from mempool.torch.offload.host_engine import HostEngine

#: Timed steps in a row, and steps before them in which the mode learns the program.
_STEPS, _BEFORE = 6, 6


class Empty(TorchDispatchMode):
    """A dispatch mode that counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Pictures:
    """Training steps of ResNet-50 on one batch."""

    def __init__(self, pictures: int, side: int) -> None:
        torch.manual_seed(0)
        self.model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9, foreach=True)
        self.batch = {
            "pixel_values": torch.randn(pictures, 3, side, side),
            "labels": torch.zeros(pictures, dtype=torch.long),
        }

    def step(self) -> None:
        """Run one step."""
        self.optimizer.zero_grad()
        self.model(**self.batch).loss.backward()
        self.optimizer.step()


class Small:
    """Fifty additions and the training step of a small linear layer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer, self.batch = torch.nn.Linear(8, 8), torch.randn(4, 8)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), 0.01, momentum=0.9)

    def step(self) -> None:
        """Run one step."""
        x = torch.randn(64)
        for _ in range(50):
            x = x + 1
        self.optimizer.zero_grad()
        self.layer(self.batch).relu().sum().backward()
        self.optimizer.step()


@contextlib.contextmanager
def limited(client: Any, step: Callable[[], None], *, pass_by: bool) -> Iterator[None]:
    """Run the body within a limit that is never reached, after the mode has learned the step."""
    engine = HostEngine(1 << 20)
    with OffloadMode(engine, torch.device("cpu"), 1 << 40, client=client) as swapper:
        if not pass_by:
            swapper.bypass = None
        for _ in range(_BEFORE):
            step()
        assert swapper.bypass is None or swapper.bypass.is_open
        yield
        assert swapper.bypass is None or swapper.bypass.is_open
        assert swapper.counts.out_bytes == 0
    engine.close()


def best(step: Callable[[], None], within: Any) -> float:
    """Return the seconds of the fastest of some steps."""
    seconds = []
    with within:
        for _ in range(_STEPS):
            begin = time.process_time_ns()
            step()
            seconds.append(time.process_time_ns() - begin)
    return min(seconds) / 1e9


def measure(step: Callable[[], None], client: Any, rounds: int) -> dict[str, float]:
    """Print and return the seconds of a step for each of the four ways."""
    step()  # the first one makes what the others have
    with Empty() as empty:
        step()
    found: dict[str, float] = {}
    for _ in range(rounds):
        around = {
            "nothing": contextlib.nullcontext(),
            "a mode that does nothing": Empty(),
            "a limit, each seen": limited(client, step, pass_by=False),
            "a limit, passing by": limited(client, step, pass_by=True),
        }
        for name, within in around.items():
            found[name] = min(found.get(name, float("inf")), best(step, within))
    print(f"{empty.count} operations")
    for name, seconds in found.items():
        cost = (seconds - found["nothing"]) / empty.count
        print(f"  {name:26} {seconds * 1e6:9.0f} us a step {cost * 1e6:6.1f} us an operation")
    return found


def main() -> None:
    """Measure both programs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--large", type=int, default=0, help="pictures of 224 x 224")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with mempool.torch.install(device="cpu", mode="record") as pool:
        print("fifty additions and a linear layer: ", end="")
        measure(Small().step, pool.client, given.rounds)
        print("ResNet-50, two pictures of 32 x 32: ", end="")
        found = measure(Pictures(2, 32).step, pool.client, given.rounds)
    if given.large:
        seconds = best(Pictures(given.large, 224).step, contextlib.nullcontext())
        print(f"a step of {given.large} at 224 x 224: {seconds:.2f} s, of which")
        for name, of_one in found.items():
            print(f"  {name:26} {(of_one - found['nothing']) / seconds:7.2%}")


if __name__ == "__main__":
    main()
