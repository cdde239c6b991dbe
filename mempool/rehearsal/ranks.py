"""Rehearsal of distributed programs as the first of several ranks, without communication."""

from __future__ import annotations

import copy
import functools
import re
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
    """Skip DistributedDataParallel's comparison of shapes with other ranks, which send none."""
    from torch.nn.parallel import distributed

    distributed._verify_param_shape_across_processes = lambda *_, **__: True


def keep_objects() -> None:
    """Make exchanges of objects return this rank's objects for all ranks, instead of zero bytes.

    Groups of Gloo, whose processes exist, exchange objects normally.
    """
    import torch.distributed as dist

    def gathered(objects: Any, value: Any, *_: Any, **__: Any) -> None:
        objects[:] = [copy.deepcopy(value) for _ in objects]

    def gathered_by_one(value: Any, objects: Any = None, *_: Any, **__: Any) -> None:
        gathered(objects or [], value)

    def scattered(result: Any, objects: Any = None, *_: Any, group: Any = None, **__: Any) -> None:
        if objects:
            result[0] = copy.deepcopy(objects[dist.get_rank(group)])

    for name, keep in {
        "all_gather_object": gathered,
        "gather_object": gathered_by_one,
        "scatter_object_list": scattered,
        "broadcast_object_list": lambda *_, **__: None,
    }.items():
        _replace(dist, name, functools.partial(_unless_exchanged, dist, getattr(dist, name), keep))


def _unless_exchanged(dist: Any, exchange: Any, keep: Any, *args: Any, **options: Any) -> Any:
    groups = [each for each in (*args, options.get("group")) if isinstance(each, dist.ProcessGroup)]
    exchanges = "gloo" in str(dist.get_backend_config(*groups))
    return (exchange if exchanges else keep)(*args, **options)


def _replace(dist: Any, name: str, function: Any) -> None:
    for module in (dist, dist.distributed_c10d, dist.device_mesh):
        if hasattr(module, name):
            setattr(module, name, function)


def pretend(ranks: int) -> None:
    """Make ``torch.distributed.init_process_group`` create the first of ``ranks`` ranks.

    Groups on devices use the stand-in's NCCL, whose communicators never wait; collectives on the host do
    nothing. Values gathered from other ranks are zero.
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

    make_more = dist.new_group

    @functools.wraps(make_more)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any
    ) -> Any:
        if backend is not None:  # other backends wait for other ranks
            backend = re.sub("gloo|mpi|ucc", "fake", str(backend).lower())
        return make_more(ranks, timeout, backend, *args, **options)

    _replace(dist, "init_process_group", init_process_group)
    _replace(dist, "new_group", new_group)
    _replace(dist, "monitored_barrier", lambda *_, **__: None)
