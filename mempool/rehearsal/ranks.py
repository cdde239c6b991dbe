"""Distributed programs as the first of several ranks, on PyTorch's process group that sends nothing."""

from __future__ import annotations

import functools
from typing import Any

#: Environment of a process that torchrun starts; `mempool.rehearsal.rehearse` adds the number of ranks.
ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def pretend(ranks: int) -> None:
    """Let ``torch.distributed.init_process_group`` make the first of so many ranks, whatever the backend."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    make = dist.init_process_group

    @functools.wraps(make)
    def init_process_group(*_: Any, **options: Any) -> None:
        kept = {name: value for name, value in options.items() if name in ("timeout", "device_id", "group_name")}
        make(backend="fake", store=FakeStore(), rank=0, world_size=ranks, **kept)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group
