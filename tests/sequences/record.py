"""Record the sequences in this folder: one steady iteration of each program, as found by the pool.

    python tests/sequences/record.py

Needs the extra `torch` and transformers. Each file is in MiniMalloc's format: `lower` and `upper` are the
events of the iteration that allocate and free a buffer, two events for each buffer; a buffer that outlives
its iteration is freed at an event of a later one. Persistent and small buffers are omitted. The networks are
those of `tests/torch/models.py` on a CPU: in training, in training with fewer samples, and in evaluation.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from traces import Buffers

HERE = Path(__file__).parent
NETWORKS = ("resnet", "unet", "seq2seq", "gpt", "bert", "llama")
SAMPLES = {"train": 4, "fewer": 3, "evaluate": 4}
STEPS = 24


def step_of(network: str, way: str) -> Callable[[int], Any]:
    """Return the function of one iteration."""
    import torch

    sys.path.insert(0, str(HERE.parent / "torch"))
    from models import MODELS

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = MODELS[network]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def train(number: int) -> None:
        optimizer.zero_grad()
        model.loss(*model.batch(number, SAMPLES[way])).backward()
        optimizer.step()

    @torch.no_grad()
    def evaluate(number: int) -> float:
        return float(model.loss(*model.batch(number, SAMPLES[way])))

    if way != "evaluate":
        return train
    model.eval()
    return evaluate


def by_rank(buffers: Buffers) -> Buffers:
    """Return the temporary buffers on a circle whose times are the ranks of their events."""
    from traces import Buffers

    stays = buffers.persistent
    start, end, size = buffers.start[~stays], buffers.end[~stays], buffers.size[~stays]
    assert buffers.period is not None
    ages = end // buffers.period
    times = np.concatenate([start, end % buffers.period])
    rank = np.empty(len(times), np.int64)
    rank[np.argsort(times, kind="stable")] = np.arange(len(times))
    return Buffers.of(rank[: len(start)], rank[len(start) :] + ages * len(times), size)


def record(network: str, way: str) -> None:
    """Record a program and write its file."""
    import mempool.torch
    from traces.formats.minimalloc import write_csv

    with mempool.torch.install(device="cpu", background=False) as pool:
        step = step_of(network, way)
        for number in range(STEPS):
            step(number)
            pool.step()
            pool.plan_now()
        report = pool.report().to_dict()
        buffers = by_rank(pool.planned.buffers)
        write_csv(buffers, HERE / f"{network}.{way}.csv")
        print(f"{network}.{way}: {len(buffers)} buffers, {report['hits']} hits, {report['misses']} misses")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        record(*sys.argv[1:])
    else:
        for network in NETWORKS:
            for way in SAMPLES:
                subprocess.run([sys.executable, __file__, network, way], check=True)
