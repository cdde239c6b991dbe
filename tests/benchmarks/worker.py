"""Process of a benchmark: a workload under one allocator, which runs the steps that its stdin requests.

Arguments: WORKLOAD ("network", "wander" or, in PyTorch, "conv" and the models of tests/torch), ALLOCATOR
("default" or "pool"). Lines in: ``steps N``, ``timed N``, ``end``. Lines out: one JSON object for each.
"""

from __future__ import annotations

import importlib
import json
import math
import mmap
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mempool.demo.network import Data, Network, warm_up
from mempool.demo.worker import forget_peak, page_faults, resident_bytes


class Training:
    """The demonstration's network, 784-1024-1024-10, batch 64, Adam."""

    def __init__(self) -> None:
        self._data, self._network = Data(np), Network(np)

    def step(self) -> str:
        return self._network.step(*self._data.batch()).hex()


class Wandering:
    """A program that never repeats: 64 operations a step on arrays of random sizes and lifetimes."""

    SMALLEST, LARGEST, ALIVE = 600, 8_000_000, 100  # bytes, bytes, arrays

    def __init__(self) -> None:
        self._random = random.Random(1)
        # Mapped rather than from malloc, so that it is no part of the comparison.
        self._source = np.frombuffer(mmap.mmap(-1, self.LARGEST), np.float32)
        self._alive = [self._make() for _ in range(self.ALIVE)]

    def _make(self) -> Any:
        size = self.SMALLEST * (self.LARGEST / self.SMALLEST) ** self._random.random()
        part = self._source[: int(size) // 4]
        return np.sqrt(part * part + 1) - part

    def step(self) -> str:
        total = 0.0
        for _ in range(64):
            at = int(self.ALIVE * math.sqrt(self._random.random()))  # some live much longer than others
            fresh = self._make()
            total += float(self._alive[at].sum()) + float((fresh > 0.5).sum())
            self._alive[at] = fresh
        return total.hex()


class Convolutions:
    """Six convolutions of 32 to 128 channels on 64 pictures of 32 by 32, AdamW, in PyTorch."""

    BATCH = 64

    def __init__(self) -> None:
        import torch

        from mempool.demo import torch_network

        self._network = torch_network.Network()
        random = torch.Generator().manual_seed(1)
        self._images = torch.randn(self.BATCH, 3, 32, 32, generator=random)
        self._labels = torch.randint(0, 10, (self.BATCH,), generator=random)

    def step(self) -> str:
        return self._network.step(self._images, self._labels).hex()


class Model:
    """One of the networks that the tests train, with AdamW, on batches of 32."""

    BATCH = 32

    def __init__(self, name: str) -> None:
        import torch
        from models import MODELS

        torch.set_num_threads(1)
        torch.manual_seed(1)
        self._model = MODELS[name]()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), 1e-3)
        self._number = 0

    def step(self) -> str:
        self._optimizer.zero_grad()
        loss = self._model.loss(*self._model.batch(self._number % 8, self.BATCH))
        loss.backward()
        self._optimizer.step()
        self._number += 1
        return float(loss.detach()).hex()


PLANNING = (
    "mempool.planning.variants",
    "mempool.planning.planned_pattern",
    "mempool.recording.events",
    "mempool.reporting.report",
    "solvers",
    "traces.iterations.pattern",
    "traces.intervals",
)
IN_TORCH = (
    "mempool.torch.compiled_library",
    "mempool.torch.cpu",
    "mempool.torch.cuda",
    "mempool.torch.introspection.diagnosis",
    "mempool.torch.introspection.statistics",
)
IN_NUMPY = {"network": Training, "wander": Wandering}


class Worker:
    """A workload under an allocator."""

    def __init__(self, workload: str, allocator: str) -> None:
        # The modules that a pool and its planner import count as baseline in every process.
        in_torch = workload not in IN_NUMPY
        for name in (*PLANNING, *(IN_TORCH if in_torch else ())):
            importlib.import_module(name)
        adapter = importlib.import_module("mempool.torch" if in_torch else "mempool.numpy")
        if in_torch:
            importlib.import_module("mempool.demo.torch_network").warm_up()
        else:
            warm_up(np)
        self.baseline_bytes, self.baseline_code = resident_bytes("VmRSS"), resident_bytes("RssFile")
        self.pool = (
            adapter.install(**({"device": "cpu"} if in_torch else {})) if allocator == "pool" else None
        )
        if in_torch:
            self.workload: Any = Convolutions() if workload == "conv" else Model(workload)
        else:
            self.workload = IN_NUMPY[workload]()

    def steps(self, count: int) -> dict[str, Any]:
        """Run steps.

        Return wall-clock seconds, processor seconds, page faults and result of each, and `settled`.
        """
        said: dict[str, list[Any]] = {"seconds": [], "cpu_seconds": [], "page_faults": [], "results": []}
        for _ in range(count):
            begun = time.perf_counter(), time.process_time(), page_faults()
            said["results"].append(self.workload.step())
            said["seconds"].append(time.perf_counter() - begun[0])
            said["cpu_seconds"].append(time.process_time() - begun[1])
            said["page_faults"].append(page_faults() - begun[2])
        return said | {"settled": self.settled()}

    def settled(self) -> bool:
        """Return true unless a pool records."""
        if self.pool is None:
            return True
        return not self.pool.client.state()["recording"]

    def end(self) -> dict[str, Any]:
        """Return the high-water mark of resident memory since the first timed step, and the pool's report.

        "resident_bytes" exclude the baseline, and include "code_bytes", the pages of programs and libraries
        executed since. Memory free in the C library's heap at the baseline counts in neither, even if used
        later. "process_bytes" is the high-water mark of the whole process.
        """
        whole, code = resident_bytes("VmHWM"), resident_bytes("RssFile") - self.baseline_code
        return {
            "process_bytes": whole,
            "resident_bytes": max(whole - self.baseline_bytes, 0),
            "code_bytes": max(code, 0),
            "report": None if self.pool is None else self.pool.report().to_dict(),
        }


def main(workload: str, allocator: str) -> None:
    """Answer the commands on stdin until its end."""
    worker, timed = Worker(workload, allocator), False
    for line in sys.stdin:
        what, *count = line.split()
        if what == "timed" and not timed:
            forget_peak()
            timed = True
        answer = worker.end() if what == "end" else worker.steps(int(count[0]))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "torch"))  # where the models are
    main(*sys.argv[1:])
