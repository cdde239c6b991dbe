"""Train in a separate process, in a loop as a user would write it; print the results as JSON.

    python training.py pool|plain '{"model": "resnet", ...}' ...

The loop is the same with and without the pool. If its library is named, an observer independent of the pool
(tests/native/torch_observer.cpp) checks all addresses.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import hashlib
import json
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from models import MODELS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from models import Batch, Model


@dataclass(frozen=True)
class Setup:
    """Model, data and options of a training."""

    model: str
    optimizer: str = "adamw"
    autocast: bool = False
    checkpointing: bool = False
    accumulate: int = 1
    compiled: bool = False
    workers: int = 0
    threads: int = 1
    marks: str = "none"  # none, step, iteration, watch
    background: bool = False  # plan in a thread, which is slow on a busy machine, rather than between steps
    steps: int = 20
    size: int = 4
    observer: str = ""
    plan: str = ""
    save: str = ""
    limit: int = 0  # limit in bytes of swapping; 0: none
    rewriting: dict[str, Any] | None = None  # options of the compiled backend
    vectors: bool = True  # in inductor's kernels


class Data(torch.utils.data.Dataset[Any]):
    """Batches by number."""

    def __init__(self, model: Model, setup: Setup) -> None:
        self._model, self._setup = model, setup

    def __len__(self) -> int:
        return self._setup.steps * self._setup.accumulate

    def __getitem__(self, number: int) -> Batch:
        return self._model.batch(number, self._setup.size)


def batches(model: Model, setup: Setup) -> Iterator[Batch]:
    """Yield the batches, made in this process or by worker processes."""
    data = Data(model, setup)
    if setup.workers == 0:
        yield from (data[number] for number in range(len(data)))
    else:
        yield from torch.utils.data.DataLoader(data, batch_size=None, num_workers=setup.workers)


def train(model: Model, setup: Setup, pool: Any, after: Callable[[], object] = int) -> list[str]:
    """Train; return the exact losses. Call a function after each step."""
    kinds = {"sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, foreach=True)}
    kinds["adamw"] = lambda p: torch.optim.AdamW(p, 1e-3, foreach=True)
    optimizer = kinds[setup.optimizer](model.parameters())
    if pool is not None and setup.marks == "watch":
        pool.watch(optimizer)
    loss_of = compiled(model, setup)
    losses, data = [], batches(model, setup)

    def step() -> None:
        optimizer.zero_grad()
        total = 0.0
        for _ in range(setup.accumulate):
            batch = next(data)
            with torch.autocast("cpu", torch.bfloat16, enabled=setup.autocast):
                loss = loss_of(*batch)
            (loss / setup.accumulate).backward()
            total += loss.item()
        optimizer.step()
        losses.append(total.hex())

    for _ in range(setup.steps):
        if pool is not None and setup.marks == "iteration":
            with pool.iteration():
                step()
        else:
            step()
        if pool is not None and setup.marks == "step":
            pool.step()
        if pool is not None and not setup.background:
            pool.plan_now()
        after()
    return losses


def compiled(model: Model, setup: Setup) -> Any:
    """Return the function of the loss, compiled if required."""
    if setup.rewriting is not None:
        from mempool.torch.compiled.backend import register

        register()
        return torch.compile(model.loss, backend="mempool", options=setup.rewriting)
    return torch.compile(model.loss) if setup.compiled else model.loss


def digest(model: Model) -> str:
    """Return a digest of all parameters and buffers."""
    told = hashlib.sha256()
    for tensor in model.state_dict().values():
        told.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return told.hexdigest()


def observed(library: str) -> ctypes.CDLL:
    """Insert the observer between PyTorch and the pool."""
    from mempool import _core

    observer = ctypes.CDLL(library)
    functions = (ctypes.c_void_p * 4)(*_core.torch_cpu_functions())
    observer.observe(functions)
    observer.load_bytes.restype = observer.take_peak_bytes.restype = ctypes.c_long
    _core.torch_cpu_functions = lambda: tuple(functions)
    return observer


def keep_slow_plans() -> None:
    """Keep plans that seem slow, since other tests share the machine."""
    from mempool.planning import learner

    learner.OPTIONS = dataclasses.replace(learner.OPTIONS, max_slowdown=math.inf)


def run(setup: Setup, observer: ctypes.CDLL | None, *, pooled: bool) -> dict[str, Any]:
    """Run one training; return its results."""
    torch.manual_seed(0)
    torch.set_num_threads(setup.threads)
    if not setup.vectors:
        from torch._inductor import config

        config.cpp.simdlen = 1
    pool, peaks, base = None, [], 0
    if pooled:
        import mempool.torch

        options = {key: given for key in ("plan", "limit") if (given := getattr(setup, key))}
        keep_slow_plans()
        pool = mempool.torch.install(background=setup.background, **options)
    if observer is not None:
        gc.collect()
        observer.take_peak_bytes()  # reset the peak of the previous training
        base = observer.load_bytes()
    model = MODELS[setup.model]()
    model.checkpointing = setup.checkpointing
    model.train()
    look = int if observer is None else lambda: peaks.append(observer.take_peak_bytes() - base)
    said: dict[str, Any] = {"losses": train(model, setup, pool, look), "parameters": digest(model)}
    if pool is not None:
        said["report"] = pool.report().to_dict()
        if setup.save:
            pool.save(setup.save)
        pool.close()
    if observer is not None:
        said |= {"overlaps": observer.overlaps(), "observed": observer.observed(), "peaks": peaks}
    return said


def main(way: str, setups: list[Setup]) -> None:
    torch.use_deterministic_algorithms(True)
    library = setups[0].observer if way == "pool" else ""
    observer = observed(library) if library else None
    said = [run(setup, observer, pooled=way == "pool") for setup in setups]
    print(json.dumps(said if len(said) > 1 else said[0]))


if __name__ == "__main__":
    given = [json.loads(text) for text in sys.argv[2:]]
    main(sys.argv[1], [dataclasses.replace(Setup(one["model"]), **one) for one in given])
