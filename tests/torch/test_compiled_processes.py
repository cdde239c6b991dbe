"""Two processes that train with DDP, each within a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

if TYPE_CHECKING:
    from pathlib import Path

#: What is compiled is the model inside: around it, PyTorch 2.13 traces no graph for any backend.
TRAIN = """
    import json, os, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import mempool.torch.compiled
    from mempool.torch.compiled.backend import register

    register()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(4)]
    options = {"inner": "eager", "link": "pcie3"}
    if int(sys.argv[2]):
        options["limit"] = int(sys.argv[2])
    inside = nn.Sequential(*layers)
    net = DistributedDataParallel(torch.compile(inside, backend="mempool", options=options))
    optimizer = torch.optim.SGD(inside.parameters(), 0.1)
    random = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = net(torch.randn(128, 64, generator=random)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    told = mempool.torch.compiled.report().to_dict()
    said = {"losses": losses, "parameters": [p.sum().item().hex() for p in inside.parameters()]}
    said |= {"outs": told["transfers"]["offloads"], "graphs": told["graphs"]}
    with open(f"{sys.argv[1]}/{sys.argv[2]}.{rank}.json", "w") as file:
        json.dump(said, file)
    dist.destroy_process_group()
    os._exit(0)  # PyTorch's own threads now and then abort while a process of a group ends
"""


@pytest.mark.full
def test_two_processes_hold_their_limits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")

    def told(limit: int) -> list[dict[str, object]]:
        done = subprocess.run(
            [*torchrun, str(script), str(tmp_path), str(limit)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads((tmp_path / f"{limit}.{rank}.json").read_text()) for rank in range(2)]

    plain, limited = told(0), told(400_000)
    for one, other in zip(plain, limited, strict=True):
        assert other["losses"] == one["losses"]
        assert other["parameters"] == one["parameters"]
        assert other["outs"] > 0
    assert plain[0]["parameters"] == plain[1]["parameters"]
    assert plain[0]["losses"] != plain[1]["losses"]
