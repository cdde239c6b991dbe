"""Phases, iterations and categories of recordings, and their join with a pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import subprocess
import sys

import numpy as np
from around import OptimizerWrapper
from models import MODELS
from recorded import buffer_counts, event_tuples, marks
from torch import nn

import mempool.torch
from mempool import UsageError
from mempool.cli.app import call
from mempool.recording.torch import AccessRecorder
from traces import EventType, Trace
from traces.formats.parquet import read_trace

F, B, OPT, S = "forward", "backward", "optimizer", "step"


def x() -> Any:
    return torch.ones(2, 4)


def test_modules_and_optimizers_made_inside_are_found() -> None:
    with AccessRecorder() as recorder:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(x()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = recorder.trace()
    kinds = buffer_counts(trace)
    assert (kinds["parameters"], kinds["module_buffers"], kinds["gradients"]) == (4, 3, 8)
    assert (kinds["optimizer_state"], kinds["inputs"]) == (12, 2)
    assert marks(trace) == 2 * [F, B, OPT, S]
    assert {"Sequential.0", "Sequential.1"} <= set(buffer_counts(trace, "module"))


def test_gradients_that_are_kept_and_accumulated_are_made_once() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with AccessRecorder([model], [optimizer]) as recorder:
        for _ in range(2):
            for _ in range(2):
                model(x()).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    trace = recorder.trace()
    assert buffer_counts(trace)["gradients"] == 2
    assert marks(trace)[:6] == [F, B, F, B, OPT, S]


def test_a_closure_is_forward_and_backward_inside_of_the_optimizer() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(x()).sum()
        loss.backward()
        return loss

    with AccessRecorder([model], [optimizer]) as recorder:
        optimizer.step(closure)
    trace = recorder.trace()
    assert {F, B, OPT} <= set(marks(trace))
    assert marks(trace)[-1] == S


def test_optimizer_inside_the_backward_has_the_optimizer_phase() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}

    def update(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with AccessRecorder() as recorder:
        for _ in range(3):
            model(x()).sum().backward()
    trace = recorder.trace()
    assert marks(trace).count(S) == 3
    assert buffer_counts(trace)["optimizer_state"] == 3 * 4
    assert buffer_counts(trace)["gradients"] == 3 * 4


@pytest.mark.parametrize("given", [False, True])
def test_single_optimizer_of_two_ends_iterations(given: bool) -> None:
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    one, other = (torch.optim.SGD(model.parameters(), 0.1) for model in (critic, generator))
    with AccessRecorder([generator, critic], [one, other] if given else []) as recorder:
        for _ in range(2):
            fake = generator(x())
            critic(fake.detach()).sum().backward()
            one.step()
            critic(fake).sum().backward()
            other.step()
    found = marks(recorder.trace())
    assert found == 2 * ([F, B, OPT, F, B, OPT, S] if given else [F, B, OPT, S, F, B, OPT])


@pytest.mark.parametrize("declared", [False, True])
def test_declared_steps_or_real_steps_of_a_wrapped_optimizer_end_iterations(declared: bool) -> None:
    model = nn.Linear(4, 4)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = optimizer if declared else OptimizerWrapper(optimizer)
    with AccessRecorder([model], [optimizer]) as recorder:
        for number in range(4):
            model(x()).sum().backward()
            optimizer.step()
            if declared and number % 2:
                recorder.step()
    assert marks(recorder.trace()).count(S) == 2


def test_phases_that_nobody_can_find_are_told() -> None:
    weight = torch.ones(4, requires_grad=True)
    with AccessRecorder() as recorder:
        (weight * 2).sum().backward()
        recorder.mark("optimizer")
        with torch.no_grad():
            weight -= 0.1
        recorder.step()
        (weight * 2).sum()
        recorder.mark("validation")
    assert marks(recorder.trace()) == [F, B, OPT, S, F, "validation"]


def test_inputs_are_arguments_of_the_outermost_module() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, a: Any, *, b: Any) -> Any:
            return self.inner(a.exp() + b)

    model = Two()
    with AccessRecorder([model]) as recorder, torch.no_grad():
        for _ in range(2):
            model(torch.ones(2, 4), b=torch.zeros(2, 4))
    kinds = [
        (operation, kind)
        for kind_, _, _, operation, kind in event_tuples(recorder.trace())
        if kind_ == "ALLOC"
    ]
    assert kinds.count(("aten::zeros", "inputs")) == kinds.count(("aten::ones", "inputs")) == 2
    assert ("aten::exp", "inputs") not in kinds


@pytest.mark.filterwarnings("ignore:Using .torch.compile.module:UserWarning")
def test_compiled_module_is_recorded_as_the_uncompiled_module() -> None:
    model = nn.Linear(4, 4)
    with AccessRecorder([model]) as recorder:
        torch.compile(model, backend="eager")(x()).sum().backward()
    assert buffer_counts(recorder.trace())["gradients"] == 2
    assert "aten::addmm" in buffer_counts(recorder.trace(), "operation")


@pytest.fixture
def pool() -> Iterator[mempool.torch.TensorPool]:
    with mempool.torch.install(device="cpu", background=False) as made:
        yield made


def trained(path: Path | None, name: str, *, steps: int = 2) -> Trace:
    """Record steps after an unrecorded step; the model is older than the recording."""
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
    trace.validate()  # includes that each access is within the lifetime of its buffer
    assert int(trace.load().max()) == peak
    assert marks(trace) == 2 * ["forward", "backward", "optimizer", "step"]
    assert trace.metadata["client"] == "torch"
    read = read_trace(tmp_path / "a.trace")
    assert np.array_equal(read.kind, trace.kind)
    assert buffer_counts(read, "module") == buffer_counts(trace, "module")


def test_every_storage_matches_a_pool_buffer_and_other_buffers_are_temporaries(
    pool: mempool.torch.TensorPool,
) -> None:
    joined = trained(None, "gpt")
    del pool
    kinds = buffer_counts(joined)
    mempool.torch.uninstall()
    alone = trained(None, "gpt")
    seen = buffer_counts(alone)
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
    assert buffer_counts(trace)["parameters"] == 2
    assert "Linear" in buffer_counts(trace, "module")


def test_accesses_without_a_trace_are_a_wrong_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", "--accesses", "-c", "pass"]) == 2
    assert "--record" in capsys.readouterr().err
