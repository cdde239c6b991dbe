"""Cost of recording, per operation of PyTorch, on real tensors on the CPU.

    python tests/benchmarks/recording.py [--model gpt] [--rounds 15]

One training step is taken in turns without anything, under a dispatch mode that does nothing, and under the
recorder. Processor seconds of the process with one thread, the best of the rounds for each; the cost is the
difference to the step without anything, over the operations of the step.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "torch"))

import torch
from models import MODELS
from torch.utils._python_dispatch import TorchDispatchMode

from mempool.recording.torch import AccessRecorder
from traces import EventType


class Empty(TorchDispatchMode):
    """A dispatch mode that counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Empty.count += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    """Measure and print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), action="append")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'model':10}{'ops':>7}{'events':>8}{'step ms':>9}{'empty us/op':>13}{'recorder us/op':>16}")
    for name in given.model or MODELS:
        print(_row(name, given.rounds))


def _row(name: str, rounds: int) -> str:
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = model.batch(0, 1)

    def step() -> None:
        model.loss(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def spent(mode: Any) -> float:
        with mode:
            step()
            began = time.process_time_ns()
            step()
            return (time.process_time_ns() - began) / 1e3

    best = {"none": math.inf, "empty": math.inf, "recorder": math.inf}
    for _ in range(rounds):
        best["none"] = min(best["none"], spent(contextlib.nullcontext()))
        Empty.count = 0
        best["empty"] = min(best["empty"], spent(Empty()))
        recorder = AccessRecorder([model], [optimizer])
        best["recorder"] = min(best["recorder"], spent(recorder))
    operations, events = Empty.count // 2, int((recorder.trace().kind != EventType.MARK).sum()) // 2
    cost = {name: (time - best["none"]) / operations for name, time in best.items()}
    return (
        f"{name:10}{operations:7}{events:8}{best['none'] / 1e3:9.1f}"
        f"{cost['empty']:13.1f}{cost['recorder']:16.1f}"
    )


if __name__ == "__main__":
    main()
