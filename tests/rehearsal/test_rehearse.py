"""``mempool rehearse`` on programs that use PyTorch's real CUDA build, without a GPU.

A program's process imports PyTorch, which takes seconds: each run shows several properties.
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
from answers import Cli

from mempool.rehearsal import elf

MIB, GIB = 1 << 20, 1 << 30
PROGRAMS = Path(__file__).parent / "programs"


def has_cuda_build() -> bool:
    spec = importlib.util.find_spec("torch")
    return spec is not None and Path(spec.origin or "", "../lib/libtorch_cuda.so").resolve().is_file()


pytestmark = pytest.mark.skipif(not has_cuda_build(), reason="no CUDA build of PyTorch is installed")


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"  # in which programs leave nothing
    work.mkdir()
    monkeypatch.chdir(work)


def place(name: str, mark: str) -> str:
    """Return the end of ``file:line`` of the line of a program with a comment."""
    lines = (PROGRAMS / name).read_text().splitlines()
    return f"{name}:{next(i for i, line in enumerate(lines, 1) if line.endswith(f'# {mark}'))}"


def ends(places: Any, name: str, mark: str) -> bool:
    """Return true if there is one place, the marked line."""
    places = [places] if isinstance(places, str) else list(places)
    return len(places) == 1 and places[0].endswith(place(name, mark))


def rehearse(cli: Cli, options: str, script: str, arguments: str = "", *, code: int = 0) -> Any:
    """Return the JSON answer."""
    program = script if script.startswith("-m ") else PROGRAMS / script
    return json.loads(cli.run(f"rehearse --json {options} {program} {arguments}", code=code)[0])


def test_reserved_bytes_of_each_allocator_and_batch_size_equal_pytorch_statistics(cli: Cli) -> None:
    report = Path("../report.txt").resolve()
    options = "--card 'RTX 4090' --limit 200MiB -a native,mempool --vary batch_size=64,16384"
    runs = rehearse(cli, options, "loop.py", f"--batch_size=8 --report={report}")
    assert [(run["batch_size"], run["allocator"]) for run in runs] == [
        ("64", "native"),
        ("64", "mempool"),
        ("16384", "native"),
        ("16384", "mempool"),
    ]
    reported = [json.loads(line) for line in report.read_text().splitlines()]
    del reported[3]  # the run within the limit
    assert [run["within_limit"] is None for run in runs] == [True, True, False, True]
    assert [[run["peak_allocated_bytes"], run["peak_reserved_bytes"]] for run in runs] == reported
    assert [run["fits"] for run in runs] == [True, True, False, False]
    for run in runs:
        assert 0 < run["peak_allocated_bytes"] <= run["peak_reserved_bytes"] <= 200 * MIB
        assert run["peak_reserved_bytes"] < run["device_bytes"] < 24 * GIB
        assert (run["card"], run["limit_bytes"], run["devices_used"]) == ("RTX 4090", 200 * MIB, 1)
    for run in runs[:2]:
        assert (run["steps"], run["ended"], run["exit_code"], run["message"]) == (4, "steps", 0, "")
        peaks = run["step_peak_bytes"]
        assert len(peaks) == 4
        assert 0 < peaks[0] <= peaks[1] == peaks[2] == peaks[3]
        assert ends(run["value_reads"], "loop.py", "the value")
        assert run["value_reads"].popitem()[1] == 3
    for run in runs[2:]:
        assert (run["steps"], run["ended"], run["out_of_memory_in_step"]) == (0, "out of memory", 1)
        assert run["message"].startswith("OutOfMemoryError: ")
    assert "Sequential.0" in [share["module"] for share in runs[0]["modules"]]


def test_cost_of_a_relative_limit_is_predicted_by_the_times_of_the_card(cli: Cli) -> None:
    options = "--card 'RTX 4090' --limit 70%"
    run = rehearse(cli, options, "loop.py", "--batch_size=16384 --report=report.txt")
    cost = run["within_limit"]
    assert cost["planned"]
    assert 0.65 * run["peak_allocated_bytes"] < cost["limit_bytes"] < 0.75 * run["peak_allocated_bytes"]
    assert 0 < cost["smallest_limit_bytes"] <= cost["limit_bytes"]
    assert 0 < cost["host_bytes"] <= cost["moved_bytes"]
    assert 1e-3 < cost["step_seconds"] < 1  # 155 GFLOP at 82 TFLOPS
    assert cost["slow_down"] == 1 + cost["added_seconds"] / cost["step_seconds"]


@pytest.mark.usefixtures("without_triton")  # the run without the limit takes less time
def test_cost_of_a_limit_is_predicted_for_a_compiled_program(cli: Cli) -> None:
    options, program = "--card 'RTX 4090'", "--batch_size=16384 --report=report.txt --compile"
    cost = rehearse(cli, f"{options} --limit 95%", "loop.py", program)["within_limit"]
    assert cost["compiled"]
    assert cost["planned"]
    assert 0 < cost["smallest_limit_bytes"] <= cost["limit_bytes"]
    assert 1 <= cost["slow_down"] < 2
    refused = rehearse(cli, f"{options} --limit 100MiB", "loop.py", program, code=1)["within_limit"]
    assert not refused["planned"]
    assert refused["limit_bytes"] == 100 * MIB < refused["smallest_limit_bytes"] <= cost["limit_bytes"]


def test_fit_of_a_program_is_its_rehearsal(cli: Cli) -> None:
    script, asked = PROGRAMS / "loop.py", "--card 'RTX 4090' --limit 8GiB --json"
    fitted = json.loads(cli.run(f"fit {script} --main {asked} -- --report=fit.txt")[0])
    run = rehearse(cli, "--card 'RTX 4090'", "loop.py", "--report=rehearsal.txt")
    for name in ("allocator", "steps", "peak_allocated_bytes", "peak_reserved_bytes", "ended", "card"):
        assert fitted[name] == run[name]
    out, _ = cli.run(f"fit {script} --main --limit 600MiB -- --batch_size=16384 --report=fit.txt", code=1)
    assert "out of memory" in out


def test_varied_argument_that_a_program_lacks_is_explained(cli: Cli) -> None:
    Path("train.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()")
    out, _ = cli.run("rehearse --vary bs=1,2 train.py", code=4)
    assert "if the program has no --bs, write its own argument: bs={bs}, " in out


def test_training_on_the_host_is_said_to_use_no_gpu(cli: Cli) -> None:
    Path("host.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(9, 9)\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "for _ in range(9):\n"
        "    model(torch.ones(9, 9)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    out, err = cli.run("rehearse --card T4 host.py", code=4)
    assert "used no GPU" in out
    assert "no memory was measured" in out
    assert "history.pickle" not in err


def test_trace_of_a_rehearsal_has_its_peak(cli: Cli) -> None:
    run = rehearse(
        cli, "-a expandable --limit 200MiB --steps 2 --trace step.trace", "loop.py", "--report=report.txt"
    )
    assert (run["steps"], run["fits"]) == (2, True)
    info = cli.answer("info step.trace --frames")
    assert 0.99 * run["peak_allocated_bytes"] < info["peak_load_bytes"] <= run["peak_allocated_bytes"]
    assert any("loop.py:" in buffer.get("frame", "") for buffer in info["largest_at_peak"])


def test_vision_program_with_workers_amp_and_checkpoints_runs_unchanged(cli: Cli) -> None:
    run = rehearse(cli, "", "vision.py")
    assert (run["steps"], run["ended"], run["exit_code"]) == (4, "steps", 0)
    peaks = run["step_peak_bytes"]
    assert peaks[1] == peaks[2] == peaks[3] > 8 * 64 * 32 * 32 * 4  # float32 of one convolution's output
    assert set(run["redirected"]) == {"last.pt", "out/checkpoint-1/trainer_state.json"}
    assert not list(Path().iterdir())


def test_graph_of_a_compiled_model_is_captured_and_its_checkpoint_written_if_allowed(cli: Cli) -> None:
    """Unwritten words of kernels' arguments hold addresses of freed memory, which are no uses of it."""
    run = rehearse(cli, "--allow-writes --check-streams -a mempool", "graph.py")
    assert run["stream_faults"] == []
    assert (run["steps"], run["ended"], run["exit_code"], run["message"]) == (0, "program", 0, "")
    assert run["peak_allocated_bytes"] > 2 * 256 * 256 * 4
    assert run["redirected"] == []
    assert Path("kept.pt").stat().st_size > 256 * 256 * 4


def test_linear_algebra_sparse_matrices_transforms_and_random_numbers_run(cli: Cli) -> None:
    out, err = cli.run("rehearse --json", PROGRAMS / "libraries.py")
    run = json.loads(out)
    assert (run["ended"], run["exit_code"], run["message"]) == ("program", 0, "")
    assert "lacks" not in err


def test_extension_finds_functions_of_cuda_that_pytorch_does_not_import(cli: Cli) -> None:
    pytorch = Path(importlib.util.find_spec("torch").origin, "../lib/libtorch_cuda.so").resolve()  # type: ignore[union-attr,arg-type]
    runtime = [name for name in elf.read_needed(pytorch) if name.startswith("libcudart.so")]
    for name in ("opened", "imported"):
        parts = {"silent": [f"PyInit_{name}"], "missing": ["work"], "needed": runtime}
        elf.write_library(Path(f"{name}.so"), name, handler=f"cudaGetNothing{name}", **parts)
    Path("train.py").write_text(
        "import ctypes, torch\n"
        "assert ctypes.CDLL('./opened.so').work() != 0\n"
        "try:\n    import imported\nexcept SystemError: pass\n"  # its function makes no module
        "torch.ones(8, device='cuda')"
    )
    assert rehearse(cli, "", f"{Path.cwd()}/train.py")["ended"] == "program"


def test_finite_values_pass_and_unknown_masks_select_none_or_all_as_asked(cli: Cli) -> None:
    for select, selected in (("none", 0), ("all", 32)):
        run = rehearse(cli, f"--steps 2 --select {select}", "values.py", f"../{select}.json")
        assert (run["steps"], run["ended"], run["message"]) == (2, "steps", "")
        assert json.loads(Path(f"../{select}.json").read_text()) == {
            "repeats": 48,
            "mask": 8,
            "computed repeats": 32,
            "computed mask": selected,
        }
        lines = {where.rpartition("/")[2] for where in run["shape_reads"]}
        assert lines == {place("values.py", mark) for mark in ("repeats", "mask")}


def test_memory_freed_during_use_by_a_second_stream_is_seen_without_record_stream(cli: Cli) -> None:
    for run in rehearse(cli, "--check-streams -a native,mempool", "streams.py"):
        assert (run["ended"], run["message"]) == ("program", "")
        assert [fault.count("vectorized_elementwise_kernel<") for fault in run["stream_faults"]] == [2]
        assert "FillFunctor" in run["stream_faults"][0]


def test_rank_of_ddp_holds_the_model_and_of_fsdp_its_share(cli: Cli) -> None:
    ddp, fsdp = rehearse(cli, "--ranks 4 --vary kind=ddp,fsdp", "parallel.py", "kind=x")
    model = 4 * 1024 * 1025 * 4
    assert [(run["steps"], run["ended"]) for run in (ddp, fsdp)] == [(4, "steps")] * 2
    assert ddp["allocated_bytes"] > 4 * model  # parameters, gradients, two moments
    assert fsdp["allocated_bytes"] < ddp["allocated_bytes"] - 3 * model
    assert fsdp["peak_allocated_bytes"] < ddp["peak_allocated_bytes"]
    assert fsdp["redirected"] == ["shards"]
    assert not Path("shards").exists()


def test_data_parallel_uses_all_devices_of_the_machine(cli: Cli) -> None:
    out, _ = cli.run("rehearse --quiet --devices 2", PROGRAMS / "parallel.py", "kind=dp")
    assert "ended after 4 steps" in out
    assert "of GPU 0, the fullest of 2 that held memory" in out


def test_processes_that_fit_alone_do_not_fit_together_on_a_card(cli: Cli) -> None:
    """Each ends after its steps, and has a result although multiprocessing calls no exit handlers."""
    run = rehearse(cli, "--card 'RTX 3060' --steps 2", "processes.py", "fork 26000", code=1)
    assert (run["ended"], run["steps"], run["peak_reserved_bytes"], run["fits"]) == ("program", 0, 0, False)
    one, two = run["processes"]
    assert {one["name"], two["name"]} == {"ForkProcess-1", "ForkProcess-2"}
    for process in (one, two):
        assert (process["steps"], process["device"], process["out_of_memory_in_step"]) == (2, 0, None)
        assert process["peak_allocated_bytes"] > 2 * 26000**2 * 4
        assert 6 * GIB < process["device_bytes"] < 11 * GIB


@pytest.mark.parametrize("size", [50000, 70000])  # of the larger model, the first request fails
def test_lack_of_memory_in_a_child_process_is_the_answer_no(cli: Cli, size: int) -> None:
    out, _ = cli.run("rehearse --card T4", PROGRAMS / "processes.py", f"spawn {size}", code=1)
    assert "SpawnProcess-1" in out
    assert "out of memory in step 1" in out
    assert "which the program handled" not in out
    assert "processes share GPU 0: together they hold up to" in out


def test_checkpoint_of_a_rehearsal_that_a_signal_ends_is_removed(cli: Cli) -> None:
    Path("train.py").write_text(
        "import os, signal\nopen('a.pt', 'w')\nos.kill(os.getppid(), signal.SIGHUP)\nsignal.pause()"
    )
    with pytest.raises(SystemExit, match="129"):
        cli.run("rehearse train.py")
    assert not Path("a.pt").exists()


def test_process_that_replaces_itself_and_shares_a_tensor_is_the_program(cli: Cli) -> None:
    run = rehearse(cli, "", "replaced.py")
    assert (run["ended"], run["steps"], run["processes"]) == ("steps", 4, [])
    assert run["peak_allocated_bytes"] >= 4 * MIB


def test_workers_and_failed_and_lasting_child_processes(cli: Cli) -> None:
    """A worker of a pool trains on after the steps; an error has its row; no process is left behind."""
    run = rehearse(cli, "--steps 2", "children.py")
    assert run["ended"] == "program"
    ended = {process["name"]: (process["ended"], process["steps"]) for process in run["processes"]}
    assert ended["ForkPoolWorker-1"] == ("program", 6)
    assert ended["ForkProcess-2"] == ("error", 0)
    left = int(Path("../left.txt").read_text())
    deadline = time.monotonic() + 30
    while Path(f"/proc/{left}").exists() and "Z" not in Path(f"/proc/{left}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ranks_that_torchrun_starts_have_results(cli: Cli) -> None:
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node 2 {PROGRAMS / 'parallel.py'}"
    run = rehearse(cli, "--card 'RTX 3060' --devices 2", launcher, "kind=ddp")
    assert (run["fits"], run["peak_reserved_bytes"]) == (True, 0)
    ranks = {process["name"]: process for process in run["processes"]}
    assert ranks.keys() == {"parallel.py rank 0", "parallel.py rank 1"}
    for rank in (0, 1):
        process = ranks[f"parallel.py rank {rank}"]
        assert (process["steps"], process["device"]) == (4, rank)
        assert process["device_bytes"] > process["peak_reserved_bytes"] > 4 * 4 * 1024 * 1025 * 4


def test_lack_of_memory_on_a_card_is_the_answer_no_whether_caught_or_not(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
    runs = rehearse(cli, "--card T4 --vary how=raised,caught ", "-m package.train", "how=x", code=1)
    assert [(run["ended"], run["steps"], run["exit_code"]) for run in runs] == [
        ("out of memory", 1, 1),
        ("steps", 4, 0),
    ]
    for run in runs:
        assert (run["fits"], run["out_of_memory_in_step"]) == (False, 2)
        assert ends(run["line"], "package/train.py", "too much")
    assert "Tried to allocate 20.00 GiB" in runs[0]["message"]


def test_lack_of_memory_in_a_backward_pass_has_the_line_that_calls_the_pass(cli: Cli) -> None:
    run = rehearse(cli, "--limit 10GiB", "backward.py", code=1)
    assert (run["ended"], run["out_of_memory_in_step"]) == ("out of memory", 1)
    assert ends(run["line"], "backward.py", "too much")


def test_long_program_without_steps_has_its_peak_although_the_history_takes_time(cli: Cli) -> None:
    """Longer than a program has to end after its last step."""
    lines = ["import time, torch", "x = torch.zeros(1 << 28, device='cuda')", "time.sleep(10)"]
    Path("serve.py").write_text("\n".join([*lines, "for _ in range(30_000): x[:1024] + 1"]))
    run = rehearse(cli, "", f"{Path.cwd()}/serve.py")
    assert (run["ended"], run["steps"]) == ("program", 0)
    assert run["peak_allocated_bytes"] >= GIB


def test_time_ends_a_program_at_an_operation(cli: Cli) -> None:
    """Elsewhere the program could be in a callback that ignores exceptions, as it mostly is here."""
    lines = ["import time, torch, weakref", "model = torch.nn.Linear(64, 64).cuda()", "for _ in range(100):"]
    lines += ["    y = model(torch.zeros(8, 64, device='cuda'))"]
    lines += ["    r = weakref.ref(y, lambda _: time.sleep(0.4))", "    del y"]
    Path("serve.py").write_text("\n".join(lines))
    run = rehearse(cli, "--seconds 6", f"{Path.cwd()}/serve.py")
    assert (run["ended"], run["exit_code"]) == ("seconds", 0)
    assert run["seconds"] < 14  # sooner than after the time that a program has to end


@pytest.mark.parametrize(
    ("how", "ended", "message"),
    [
        ("error", "error", "ValueError: no such file"),
        ("device", "error", "AcceleratorError: CUDA error: invalid device ordinal"),
        ("hang", "hang", "no optimizer step within 1 s, in "),
    ],
)
def test_program_that_fails_or_hangs_is_named_with_its_line(
    cli: Cli, how: str, ended: str, message: str
) -> None:
    seconds = 1 if how == "hang" else 100
    out, err = cli.run(f"rehearse --json --timeout {seconds}", PROGRAMS / "broken.py", f"how={how}", code=4)
    run = json.loads(out)
    assert (run["ended"], run["fits"], run["steps"]) == (ended, False, 0)
    assert run["message"].startswith(message)
    assert ends(run["line"], "broken.py", how)
    assert ("Traceback" in err) == (ended == "error")
    assert ["--devices N" in note for note in run["notes"]] == [True] * (how == "device")
