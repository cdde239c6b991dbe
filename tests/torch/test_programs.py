"""Unmodified programs under ``mempool run``, and several training processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from traces.formats.parquet import read_trace

TRAIN = """
    import argparse
    import torch
    from torch import nn

    class Data(torch.utils.data.Dataset):
        def __init__(self): self.x = torch.randn(96, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        def __len__(self): return len(self.x)
        def __getitem__(self, i): return self.x[i], i % 10

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int, default=1)
        args = parser.parse_args()
        torch.manual_seed(0)
        torch.set_num_threads(1)
        net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(),
                            nn.LazyLinear(10))
        loader = torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=2)
        net(torch.zeros(1, 3, 16, 16))
        optimizer = torch.optim.Adam(net.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for epoch in range(args.epochs):
            total = 0.0
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                total += loss.item()
            schedule.step()
            print(epoch, total.hex())

    if __name__ == "__main__":
        main()
"""
DISTRIBUTED = """
    import json, os, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    way, folder = sys.argv[1:]
    torch.set_num_threads(1)

    def train(steps, after=int):
        torch.manual_seed(0)
        net = DistributedDataParallel(nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 10)))
        optimizer = torch.optim.AdamW(net.parameters())
        random = torch.Generator().manual_seed(dist.get_rank())
        losses = []
        for step in range(steps):
            x, y = torch.randn(32, 200, generator=random), torch.randint(0, 10, (32,), generator=random)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
            after()
        return losses

    store = f"file://{folder}/{way}.store"
    dist.init_process_group("gloo", store, rank=int(os.environ["RANK"]), world_size=2)
    steps = 20 if way == "planned" else 200  # beside other work a plan may come late
    said = {"plain": train(steps)} if way == "pool" else {}
    import dataclasses, mempool.torch
    from mempool.planning import learner
    learner.OPTIONS = dataclasses.replace(learner.OPTIONS, max_slowdown=float("inf"))  # others run
    pool = mempool.torch.install(device="cpu", plan=f"{folder}/train.plan" if way == "planned" else None)
    said |= {"losses": train(steps, pool.step), "report": pool.report().to_dict()}
    if way == "pool":
        pool.save(f"{folder}/train.plan")
    with open(f"{folder}/{way}{dist.get_rank()}.json", "w") as file:
        json.dump(said, file)
    pool.close()
    dist.destroy_process_group()
    os._exit(0)  # PyTorch's own threads now and then abort while a process of a group ends, without us too
"""


def write(path: Path, text: str) -> str:
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_unmodified_program_runs_under_mempool_run(tmp_path: Path) -> None:
    """A program with loader workers, lazy layers and a schedule has the same output, and a report."""
    script = write(tmp_path / "train.py", TRAIN)
    command = [script, "--epochs", "4"]
    plain = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    pooled = subprocess.run(
        [sys.executable, "-m", "mempool", "run", "--json", str(tmp_path / "report.json"), *command],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert pooled.stdout == plain.stdout
    assert "mempool: torch" in pooled.stderr
    report = json.loads((tmp_path / "report.json").read_text())["pools"]["torch"]
    assert report["state"] == "replaying"
    assert report["hit_rate"] > 0.99


def test_two_training_processes_have_separate_pools_and_plans(tmp_path: Path) -> None:
    """The next run of each process starts with the process's own plan."""
    script = write(tmp_path / "ddp.py", DISTRIBUTED)
    for way in ("pool", "planned"):
        processes = [
            subprocess.Popen(
                [sys.executable, script, way, str(tmp_path)],
                env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for process in processes:
            _, said = process.communicate(timeout=280)
            assert process.returncode == 0, said[-3000:]
    for rank in range(2):
        pooled, planned = (
            json.loads((tmp_path / f"{way}{rank}.json").read_text()) for way in ("pool", "planned")
        )
        assert pooled["losses"] == pooled["plain"]
        assert pooled["report"]["state"] == "replaying"
        assert pooled["report"]["misses"] == 0, pooled["report"]["misses_by_reason"]  # as one process alone
        assert pooled["report"]["hits"] >= 10 * pooled["report"]["planned_buffers"] > 0
        assert pooled["report"]["coverage"] >= 0.99
        assert (tmp_path / f"train.rank{rank}.plan").exists()
        assert planned["losses"] == pooled["plain"][: len(planned["losses"])]
        assert planned["report"]["plan_active_at_iteration"] <= 1
        asked = sum(planned["report"][what] for what in ("hits_total", "misses_total"))
        assert planned["report"]["hits_total"] > 0.98 * asked > 0


BOTH = """
    import numpy as np
    {torch}
    for i in range(200):
        a = np.ones((64, 64)) @ np.ones((64, 64))
    {more}
"""


@pytest.mark.parametrize("uses_torch", [True, False])
def test_program_with_two_frameworks_has_a_trace_of_each(tmp_path: Path, uses_torch: bool) -> None:
    """The given file has the trace of the framework used last; a second file has the other trace."""
    more = "for i in range(100): t = torch.ones(100, 100) @ torch.ones(100, 100)" if uses_torch else ""
    script = write(tmp_path / "p.py", BOTH.format(torch="import torch", more=more))
    trace = tmp_path / "t.trace"
    command = [sys.executable, "-m", "mempool", "run", "--quiet", "--record", str(trace), script]
    subprocess.run(command, check=True, cwd=tmp_path)
    arrays = read_trace(tmp_path / "t.numpy.trace" if uses_torch else trace)
    assert int((arrays.size == 64 * 64 * 8).sum()) == 600
    assert arrays.metadata["client"] == "numpy"
    assert len(list(tmp_path.glob("*.trace"))) == 1 + uses_torch
    if uses_torch:
        tensors = read_trace(trace)
        assert int((tensors.size == 40_000).sum()) == 300
        assert tensors.metadata["client"] == "torch"


def test_saved_plan_serves_its_own_framework(tmp_path: Path) -> None:
    script = write(tmp_path / "p.py", BOTH.format(torch="import sys, torch", more=""))
    trace, plan, report = (str(tmp_path / name) for name in ("t.trace", "t.plan", "r.json"))
    mempool = [sys.executable, "-m", "mempool"]
    subprocess.run([*mempool, "run", "--quiet", "--record", trace, script], check=True, cwd=tmp_path)
    subprocess.run([*mempool, "plan", trace, "-o", plan], check=True, cwd=tmp_path, capture_output=True)
    command = [*mempool, "run", "--quiet", "--plan", plan, "--json", report, script]
    subprocess.run(command, check=True, cwd=tmp_path)
    pools = json.loads((tmp_path / "r.json").read_text())["pools"]
    assert pools["numpy"]["hits"] > 500
    assert pools["torch"]["arena_bytes"] == 0
