"""Train one of several replicas (ddp), a shard of the model (fsdp), or all replicas in one process (dp)."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

kind, device = sys.argv[1].removeprefix("kind="), int(os.environ.get("LOCAL_RANK", "0"))
torch.cuda.set_device(device)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
if kind == "dp":
    model = torch.nn.DataParallel(model)
else:
    init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))  # makes the process group
    assert [dist.get_rank(), dist.get_world_size()] == [int(os.environ[x]) for x in ("RANK", "WORLD_SIZE")]
    on_host, objects, size = dist.new_group(backend="gloo"), [None] * dist.get_world_size(), [0]
    for group in (None, on_host):
        dist.barrier(group)
        dist.all_gather_object(objects, "all", group=group)
        assert objects == ["all"] * len(objects)
        dist.scatter_object_list(size, [7] * len(objects) if dist.get_rank() == 0 else None, group=group)
        dist.gather_object("one", objects if dist.get_rank() == 0 else None, group=group)
    assert dist.get_rank() > 0 or (objects, size) == (["one"] * len(objects), [7])
if kind == "ddp":
    model = DistributedDataParallel(model, device_ids=[device])
if kind == "fsdp":
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id="shards")
    dcp.load({"model": model.state_dict()}, checkpoint_id="shards")
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(32, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
