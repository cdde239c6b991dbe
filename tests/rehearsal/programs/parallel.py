"""Train one of several replicas (ddp), a shard of the model (fsdp), or all replicas in one process (dp)."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

kind, device = sys.argv[1].removeprefix("kind="), int(os.environ.get("LOCAL_RANK", "0"))
torch.cuda.set_device(device)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
if kind == "dp":
    model = torch.nn.DataParallel(model)
else:
    dist.init_process_group("nccl")
    assert [dist.get_rank(), dist.get_world_size()] == [int(os.environ[x]) for x in ("RANK", "WORLD_SIZE")]
if kind == "ddp":
    model = DistributedDataParallel(model, device_ids=[device])
if kind == "fsdp":
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(32, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
