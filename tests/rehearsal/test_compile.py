"""``torch.compile`` on the stand-in: Triton's kernels, and CUDA graph trees under the pool's backends."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from answers import Cli
from processes import alone, run_each_alone

from mempool.rehearsal import compilation

if __name__ == "__main__":  # pytest's own process has no stand-in, without which PyTorch cannot be imported
    import torch
    from standin_torch import driver

    import mempool.torch
    from mempool import UsageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's own modules
        # The modules look for a device, after which CUDA could not be used in a fork.
        os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        import torch._dynamo.backends.cudagraphs
        import torch._inductor.compile_fx

PROGRAMS = Path(__file__).parent / "programs"
WIDTH = 256


# --- kernels


def test_compiled_program_holds_less_and_compiling_takes_no_memory(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libraries: dict[str, str]
) -> None:
    monkeypatch.setenv("MEMPOOL_CACHE", str(tmp_path / "cache"))
    report, log = tmp_path / "report.json", tmp_path / "workers.log"
    monkeypatch.setenv("TORCHINDUCTOR_WORKER_LOGPATH", str(log))
    monkeypatch.setenv("TORCHINDUCTOR_WORKER_SUPPRESS_LOGGING", "0")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "2")
    out, _ = cli.run(f"rehearse --json --steps 9 --card 'A100 40GB' {PROGRAMS / 'fused.py'} {report}")
    run, found = json.loads(out), json.loads(report.read_text())
    assert (run["steps"], run["notes"], run["value_reads"], run["shape_reads"]) == (8, [], {}, {})
    # Processes that compile have the stand-in, too; their end may close a pipe that Python still uses.
    assert log.read_text().split("Exception ignored in: <module 'threading'")[0] == ""
    assert found["compiled"]["peak"] < 0.8 * found["eager"]["peak"]
    # Timing kernels or padding would take the size of the cache, or of the matrices: 50 MiB and more.
    assert found["compiled"]["first"] - found["compiled"]["last"] < 1 << 20
    generated = "".join(file.read_text() for file in (tmp_path / "cache").rglob("*.py"))
    assert "5008" in generated  # padded
    assert ", 3.0, tl.float32)" in generated  # the root of the constant


def test_program_without_triton_runs_operation_by_operation_with_a_note(
    cli: Cli, tmp_path: Path, libraries: dict[str, str], without_triton: None
) -> None:
    program = PROGRAMS / "loop.py"
    out, _ = cli.run(f"rehearse --json --steps 1 {program} --compile --report={tmp_path / 'report'}")
    (note,) = json.loads(out)["notes"]
    assert note.startswith("torch.compile had no effect: pip install --no-deps triton==")


@pytest.mark.full
@alone
def test_graph_that_does_not_compile_runs_operation_by_operation(tmp_path: str) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"CC": "false", "TRITON_CACHE_DIR": tmp_path, "TORCHINDUCTOR_CACHE_DIR": tmp_path}
    x = torch.ones(WIDTH, device="cuda", requires_grad=True)
    y = torch.compile(lambda x: x.sin() * 2)(x)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == ((WIDTH,), (WIDTH,))
    (error,) = compilation.failures
    assert error.startswith("CalledProcessError: ")
    assert "TORCHDYNAMO" not in error


def test_kernels_are_kept_for_a_rehearsal_where_no_folder_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMPOOL_CACHE", "/dev/null/cache")
    assert compilation.environment(tmp_path)["TRITON_CACHE_DIR"].startswith(str(tmp_path))


@alone
def test_uses_of_memory_by_compiled_kernels_are_seen() -> None:
    warnings.simplefilter("ignore")
    x, y, side = *torch.ones(2, WIDTH, device="cuda"), torch.cuda.Stream()
    double = torch.compile(lambda x: x * 2)
    double(x)
    x.copy_(y)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        double(x)
    assert driver().faults == []
    torch.cuda.current_stream().wait_stream(side)
    x.copy_(y)
    with torch.cuda.stream(side):
        double(x)
    (fault,) = driver().faults
    assert fault.endswith("that nothing orders: a copy or a fill and triton_poi_fused_mul_0")


# --- CUDA graph trees


def install(**options: Any) -> mempool.torch.TensorPool:
    return mempool.torch.install(**{"device": "cuda", "background": False, **options})


class Training:
    """A model in CUDA graphs, between operations that are outside of them."""

    def __init__(self) -> None:
        warnings.simplefilter("ignore")  # PyTorch makes an empty graph first
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))).to("cuda")
        self.compiled = torch.compile(self.model, backend="cudagraphs")
        self.optimizer = torch.optim.SGD(self.model.parameters())

    def step(self) -> tuple[int, int, int]:
        """Return the addresses of a tensor before the graphs, of their result, and of a gradient."""
        before = torch.relu(torch.ones(WIDTH, WIDTH, device="cuda"))
        result = self.compiled(before)
        (result.square().mean() + before.mean()).backward()
        grad = self.model[0].weight.grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        return before.data_ptr(), result.data_ptr(), grad.data_ptr()


def is_private(address: int) -> bool:
    """Return whether an address is in a segment of a private pool of PyTorch's allocator."""
    return any(
        segment["address"] <= address < segment["address"] + segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["segment_pool_id"] != (0, 0)
    )


@alone
def test_graph_trees_have_natives_memory_and_the_plan_serves_all_else() -> None:
    pool, training = install(), Training()
    pool.watch(training.optimizer)
    for _ in range(10):
        training.step()
        pool.plan_now()
    hits = pool.report().to_dict()["hits"]
    before, result, grad = training.step()
    assert pool.report().to_dict()["hits"] > hits
    assert pool.client.planned_offset_of(before) is not None
    assert [is_private(address) for address in (before, result, grad)] == [False, True, True]
    assert driver().faults == []


@alone
def test_guest_is_refused_once_a_graph_tree_exists() -> None:
    training = Training()
    for _ in range(3):
        training.step()
    with pytest.raises(UsageError, match=r"a compiled function has captured CUDA graphs: .*_dynamo\.reset"):
        install()
    torch._dynamo.reset()
    install().close()


@alone
def test_graph_trees_are_refused_by_pytorch_with_the_pluggable_backend() -> None:
    install(backend="pluggable")
    with pytest.raises(RuntimeError, match="pluggable does not yet support checkPoolLiveAllocations"):
        Training().step()


if __name__ == "__main__":
    run_each_alone(globals())
