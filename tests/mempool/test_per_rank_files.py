"""Processes that train together: each has separate files and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

import programs
import pytest
from pools import run, simulated

from mempool import Pool, per_rank_files
from mempool.cli.run.exec import is_torchrun
from traces.formats.parquet import read_trace

if TYPE_CHECKING:
    from pathlib import Path


def become(monkeypatch: pytest.MonkeyPatch, rank: int, size: int = 2) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))


def test_single_process_has_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert per_rank_files.rank() is None
    monkeypatch.setenv("RANK", "0")
    assert per_rank_files.rank() is None
    for size in ("1", "", "many", "-2"):
        monkeypatch.setenv("WORLD_SIZE", size)
        assert per_rank_files.rank() is None
    assert per_rank_files.own_file("a/run.plan") == "a/run.plan"
    assert per_rank_files.own_file("a/run.{rank}.plan") == "a/run.0.plan"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert per_rank_files.rank() == 0
    monkeypatch.delenv("RANK")
    assert per_rank_files.rank() is None
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert per_rank_files.rank() == 1


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("a.b/run.trace", "a.b/run.rank1.trace"),
        ("run", "run.rank1"),
        ("rank1/run.plan", "rank1/run.rank1.plan"),
        ("run-rank1.plan", "run-rank1.plan"),
        ("Rank_1.plan", "Rank_1.plan"),
        ("rank12.plan", "rank12.rank1.plan"),
        ("{rank}/run.plan", "1/run.plan"),
        ("/dev/null", "/dev/null"),
    ],
)
def test_file_name_gets_the_rank_once(monkeypatch: pytest.MonkeyPatch, name: str, own: str) -> None:
    become(monkeypatch, 1, 16)
    assert per_rank_files.own_file(name) == own


def test_each_rank_saves_and_replays_its_own_plan_or_the_common_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for rank in (0, 1):
        become(monkeypatch, rank)
        with Pool(simulated(), background=False) as pool:
            memory = programs.Watched(pool)
            layers = partial(programs.layers, memory, count=10 + rank)
            run(pool, lambda _, layers=layers: layers(), 8, marks=True)
            pool.save(tmp_path / "run.plan")
            assert f"mempool: pool (rank {rank})" in str(pool.report())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.rank0.plan", "run.rank1.plan"]
    buffers = []
    for rank in (0, 1, 2):
        if rank == 2:
            (tmp_path / "run.rank1.plan").rename(tmp_path / "run.plan")
        become(monkeypatch, rank, 3)
        with Pool(simulated(), background=False, plan=tmp_path / "run.plan") as pool:
            assert pool.planned is not None
            buffers.append(len(pool.planned.buffers))
    assert buffers == [30, 33, 33]


def test_traces_and_reports_of_ranks_do_not_overwrite_each_other(tmp_path: Path) -> None:
    """The processes start as under `torchrun --no-python mempool run`."""
    (tmp_path / "train.py").write_text("import numpy as np\nfor _ in range(50): np.ones(2000) * 2\n")
    command = [sys.executable, "-P", "-m", "mempool", "run", "--record", "run.trace", "--json", "run.json"]
    for rank in ("0", "1"):
        environment = {**os.environ, "RANK": rank, "WORLD_SIZE": "2"}
        done = subprocess.run(
            [*command, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        assert f"mempool: numpy (rank {rank})" in done.stderr
    names = {f"run.rank{rank}.{kind}" for rank in (0, 1) for kind in ("trace", "json")}
    assert {path.name for path in tmp_path.glob("run*")} == names
    for rank in (0, 1):
        assert len(read_trace(tmp_path / f"run.rank{rank}.trace")) >= 100
        said = json.loads((tmp_path / f"run.rank{rank}.json").read_text())
        assert said["pools"]["numpy"]["rank"] == rank


@pytest.mark.parametrize(
    ("program", "starts_others"),
    [
        (["-m", "torch.distributed.run", "train.py"], True),
        (["-mtorch.distributed.run", "train.py"], True),
        (["/usr/bin/torchrun", "train.py"], True),
        (["train.py", "torchrun"], False),
        (["-m", "train"], False),
        (["-m"], False),
        (["-c", "torchrun"], False),
    ],
)
def test_torchrun_is_known(program: list[str], starts_others: bool) -> None:
    assert is_torchrun(program) == starts_others


def test_torchrun_without_children_names_the_missing_option(tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text("print('trained')")
    command = [sys.executable, "-P", "-m", "mempool", "run"]
    for option, told in (("--quiet", True), ("--children", False)):
        done = subprocess.run(
            [*command, option, "torchrun"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout == "trained\n"
        assert ("--children" in done.stderr) == told
