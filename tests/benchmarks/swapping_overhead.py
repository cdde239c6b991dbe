"""What swapping costs an operation of PyTorch where nothing has to move, on the CPU.

    python tests/benchmarks/swapping_overhead.py [--rounds 8] [--large 8]

Training steps of transformers' ResNet-50 on small pictures, so that operations are short, are taken in turns
without anything, under a dispatch mode that does nothing, and under a `Swapper` whose limit is never reached
and that follows its plan. Processor seconds of the process with one thread, the best step of all rounds for
each; the cost is the difference to the step without anything, over the operations of the step. With
``--large`` also the part that this is of a step with so many pictures of 224 x 224.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from mempool.torch.swapping.host_engine import HostEngine
from mempool.torch.swapping.swapper import Swapper

#: Steps in a row: the first is not like those before it.
_STEPS = 4


class Empty(TorchDispatchMode):
    """Counts, and does nothing else."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Empty.count += 1
        return func(*args, **(kwargs or {}))


class Training:
    """Steps of a model on one batch."""

    def __init__(self, pictures: int, side: int) -> None:
        torch.manual_seed(0)
        self.model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9, foreach=True)
        self.batch = {
            "pixel_values": torch.randn(pictures, 3, side, side),
            "labels": torch.zeros(pictures, dtype=torch.long),
        }

    def step(self) -> None:
        """One step."""
        self.optimizer.zero_grad()
        self.model(**self.batch).loss.backward()
        self.optimizer.step()

    def best(self, mode: Any) -> float:
        """Seconds of the fastest of some steps."""
        seconds = []
        with mode:
            for _ in range(_STEPS):
                begin = time.process_time()
                self.step()
                seconds.append(time.process_time() - begin)
        return min(seconds)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--large", type=int, default=0, help="pictures of 224 x 224")
    given = parser.parse_args()
    torch.set_num_threads(1)
    training = Training(2, 32)
    engine = HostEngine(1 << 20)
    swapper = Swapper(engine, torch.device("cpu"), 1 << 60)
    modes: dict[str, Any] = {"nothing": contextlib.nullcontext(), "empty": Empty(), "swapping": swapper}
    best = dict.fromkeys(modes, float("inf"))
    for _ in range(given.rounds):
        for name, mode in modes.items():
            best[name] = min(best[name], training.best(mode))
    assert swapper.iterations.following
    assert swapper.counts.out_bytes == 0
    count = Empty.count / given.rounds / _STEPS
    print(f"{count:.0f} operations, {best['nothing'] * 1e3:.1f} ms without anything")
    for name in ("empty", "swapping"):
        cost = best[name] - best["nothing"]
        print(f"{name:10} {best[name] * 1e3:6.1f} ms, {cost / count * 1e6:5.1f} us an operation")
    if given.large:
        seconds = Training(given.large, 224).best(contextlib.nullcontext())
        share = (best["swapping"] - best["nothing"]) / seconds
        print(
            f"a step of {given.large} at 224 x 224: {seconds:.2f} s, of which {share:.2%} would be swapping's"
        )
    engine.close()


if __name__ == "__main__":
    main()
