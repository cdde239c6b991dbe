"""Accesses joined with what the pool under PyTorch allocates."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from models import MODELS
from recorded import made, marks

import mempool.torch
from mempool import UsageError
from mempool.cli.app import call
from traces import EventType, Trace
from traces.formats.parquet import read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def pool() -> Iterator[mempool.torch.TensorPool]:
    with mempool.torch.install(device="cpu", background=False) as made:
        yield made


def trained(path: Path | None, name: str, *, steps: int = 2) -> Trace:
    """Steps after one that nobody records; the model is older than the recording."""
    model: Any = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = model.batch(0, 2)

    def step() -> None:
        model.loss(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    pool = mempool.torch.installed()
    if pool is not None:
        pool.client.reset_peaks()
    with mempool.torch.record(path, model, optimizer) as recording:
        recording.own("inputs", batch)
        for _ in range(steps):
            step()
    return recording.trace


@pytest.mark.parametrize("name", ["gpt", "seq2seq"])
def test_the_peak_is_the_pools_own_and_accesses_lie_in_the_lives_of_their_buffers(
    pool: mempool.torch.TensorPool, tmp_path: Path, name: str
) -> None:
    trace = trained(tmp_path / "a.trace", name)
    peak = pool.client.stats()["requested"]["peak"]
    trace.validate()  # among others, that no access is outside of its buffer's life
    assert int(trace.load().max()) == peak
    assert marks(trace) == 2 * ["forward", "backward", "optimizer", "step"]
    assert trace.metadata["client"] == "torch"
    read = read_trace(tmp_path / "a.trace")
    assert np.array_equal(read.kind, trace.kind)
    assert made(read, "module") == made(trace, "module")


def test_every_storage_matches_a_pool_buffer_and_other_buffers_are_temporaries(
    pool: mempool.torch.TensorPool,
) -> None:
    joined = trained(None, "gpt")
    del pool
    kinds = made(joined)
    mempool.torch.uninstall()
    alone = trained(None, "gpt")
    seen = made(alone)
    for category in ("parameters", "inputs", "gradients", "optimizer_state", "activations"):
        assert kinds[category] == seen[category]
    assert kinds["temporaries"] > seen["temporaries"]  # those inside of kernels
    touched = {
        kind: int((trace.kind == kind).sum())
        for kind in (EventType.READ, EventType.WRITE)
        for trace in (alone,)
    }
    assert touched == {kind: int((joined.kind == kind).sum()) for kind in (EventType.READ, EventType.WRITE)}
    assert joined.metadata["unserved_bytes"] == "0"


def test_write_of_a_result_follows_its_alloc_and_both_name_the_operation(
    pool: mempool.torch.TensorPool,
) -> None:
    with mempool.torch.record() as recording:
        x = torch.ones(1000)
        y = x.exp()
    del pool
    trace = recording.trace
    trace.validate()
    exp = trace.names.index("aten::exp")
    kinds = [EventType(kind).name for kind in trace.kind[trace.operation == exp]]
    assert sorted(kinds) == ["ALLOC", "READ", "WRITE"]
    assert kinds.index("ALLOC") < kinds.index("WRITE")
    assert len(y) == 1000


def test_memory_that_the_pool_does_not_serve_is_left_out_and_told(pool: mempool.torch.TensorPool) -> None:
    array = np.ones(1000, np.float32)
    with mempool.torch.record() as recording:
        torch.from_numpy(array) + 1
    del pool
    recording.trace.validate()
    assert recording.trace.metadata["unserved_bytes"] == "4000"
    assert (recording.trace.kind == EventType.READ).sum() == 0


def test_recording_ended_by_an_error_is_written(pool: mempool.torch.TensorPool, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path / "a.trace")
    assert (read_trace(tmp_path / "a.trace").kind == EventType.WRITE).any()
    assert not pool.client.state()["tracing"]


def fail(path: Path) -> None:
    with mempool.torch.record(path):
        torch.ones(3)
        raise ZeroDivisionError


def test_a_pool_that_writes_a_trace_itself_cannot_be_asked_for_another(tmp_path: Path) -> None:
    with (
        mempool.torch.install(device="cpu", record=str(tmp_path / "p.trace")),
        pytest.raises(UsageError, match="writes a trace already"),
    ):
        mempool.torch.record()


def test_without_a_pool_the_trace_is_the_recorders(tmp_path: Path) -> None:
    trace = trained(tmp_path / "a.trace", "gpt", steps=1)
    assert "client" not in trace.metadata
    assert made(read_trace(tmp_path / "a.trace")) == made(trace)


PROGRAM = """
import os, sys
import numpy
import torch

net = torch.nn.Linear(64, 32)
optimizer = torch.optim.AdamW(net.parameters())
if "fork" in sys.argv and os.fork() == 0:
    net(torch.randn(8, 64)).sum().backward()
    os._exit(0)
for _ in range(3):
    net(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if "fail" in sys.argv:
    raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["fail", "fork"])
def test_unchanged_program_is_recorded(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mempool",
            "run",
            "--record",
            "a.trace",
            "--accesses",
            "--quiet",
            "train.py",
            how,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (3 if how == "fail" else 0, "")
    trace = read_trace(tmp_path / "a.trace")
    assert marks(trace) == 3 * ["forward", "backward", "optimizer", "step"]
    assert made(trace)["parameters"] == 2
    assert "Linear" in made(trace, "module")


def test_accesses_without_a_trace_are_a_wrong_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", "--accesses", "-c", "pass"]) == 2
    assert "--record" in capsys.readouterr().err
