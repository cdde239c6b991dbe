"""Programs and queries of tests of the guest, in a process on the stand-in."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch

import mempool.torch

MIB = 1 << 20


def install(**options: Any) -> mempool.torch.TensorPool:
    return mempool.torch.install(**{"device": "cuda", "backend": "guest", "background": False, **options})


def tensor(size: int, device: str = "cuda") -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def values(pool: mempool.torch.TensorPool) -> dict[str, Any]:
    return pool.report().to_dict()


def iteration() -> None:
    """Run a forward and a backward pass like those of a training."""
    kept = []
    for layer in range(10):
        kept.append(tensor(4096 * (layer % 3 + 1)))
        tensor(10_000 + 512 * layer)
    while kept:
        tensor(30_000)
        kept.pop()


def train(pool: mempool.torch.TensorPool, count: int = 12) -> None:
    for _ in range(count):
        pool.step()
        iteration()
        pool.plan_now()


def planned(pool: mempool.torch.TensorPool, *tensors: torch.Tensor) -> list[bool]:
    """Return for each tensor if its address is the planned one."""
    return [pool.client.planned_offset_of(one.data_ptr()) is not None for one in tensors]


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Drop what PyTorch's own code writes to stderr, as some releases do when memory runs out."""
    kept = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)


def native_allocations() -> int:
    """Return the number of blocks allocated by PyTorch's own allocator."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def allow(size: int) -> None:
    """Limit the bytes that PyTorch's allocator holds."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(size / total)


def counts(pool: mempool.torch.TensorPool) -> dict[str, int]:
    """Return the requests above the small-size threshold, and how many of them hit or missed."""
    found, outcomes = values(pool), pool.client.stats()["outcomes"]
    return {"requests": sum(outcomes.values()), "hits": found["hits"], "misses": found["misses"]}


def logged() -> list[str]:
    """Return a list that gets each later line of the log."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("mempool")
    log.addHandler(handler)
    log.propagate = False
    return said
