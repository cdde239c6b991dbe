"""Bytes that somebody counts: a pool, or PyTorch on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Counted(NamedTuple):
    """Bytes of this process's tensors on the device: now, and the most there were."""

    now: int
    most: int


def counted() -> Counted | None:
    """None where nobody counts, as on a CPU without a pool."""
    from mempool.torch import installed

    pool = installed()
    if pool is not None:
        requested = pool.client.stats()["requested"]
        return Counted(int(requested["current"]), int(requested["peak"]))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return Counted(int(torch.cuda.memory_allocated()), int(torch.cuda.max_memory_allocated()))
    return None
