"""Distributed programs as the first of several ranks, on PyTorch's process group that sends nothing."""

from __future__ import annotations

import functools
from typing import Any

#: Environment of a process that torchrun starts; `mempool.rehearsal.rehearse` adds the number of ranks.
ENVIRONMENT = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "ROLE_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


def accept_shapes() -> None:
    """Let DistributedDataParallel not compare shapes with other ranks: nothing sends theirs."""
    from torch.nn.parallel import distributed

    distributed._verify_param_shape_across_processes = lambda *_, **__: True


def pretend(ranks: int) -> None:
    """Let ``torch.distributed.init_process_group`` make the first of so many ranks.

    The group on devices is that of the stand-in's NCCL, whose communicators wait for nobody; collectives on
    the host do nothing. The other ranks' values are missing: what is gathered from them is zero.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"

    make = dist.init_process_group

    @functools.wraps(make)
    def init_process_group(*_: Any, **options: Any) -> None:
        kept = {
            name: value for name, value in options.items() if name in ("timeout", "device_id", "group_name")
        }
        make(backend="cpu:fake,cuda:nccl", store=dist.HashStore(), rank=0, world_size=ranks, **kept)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group
