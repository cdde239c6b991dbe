"""Installation and removal of the guest in front of PyTorch's own CUDA allocator.

Each test is a process of its own: the guest stays in front of PyTorch's allocator for good.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from processes import alone, run_each_alone

from mempool.rehearsal import standin

GPU = Path(__file__).parents[1] / "gpu"
sys.path.insert(0, str(GPU))

if __name__ == "__main__":  # pytest's own process has no stand-in, without which PyTorch cannot be imported
    import checks
    import torch
    from guest_programs import (
        MIB,
        allow,
        counts,
        install,
        logged,
        native_allocations,
        planned,
        silent,
        tensor,
        train,
    )
    from standin_torch import driver

    import mempool.torch
    from mempool import UsageError
    from mempool.torch import compiled_library


@alone
def test_expandable_segments_are_on_unless_the_program_decides_about_them() -> None:
    for own, expected in {
        "": True,
        "garbage_collection_threshold:0.9": True,
        "max_split_size_mb:64": False,
        "expandable_segments:False": False,
    }.items():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        torch._C._accelerator_setAllocatorSettings(own)
        pool = install()
        made = tensor(4 * MIB)
        (segment,) = torch.cuda.memory_snapshot()
        assert segment["is_expandable"] == expected
        del made
        pool.close()
        torch.cuda.empty_cache()


@pytest.mark.parametrize("used", ["True", "False"])
@alone
def test_removal_keeps_planned_tensors_valid_and_leaves_the_rest_to_native(used: str) -> None:
    pool = install()
    data = torch.full((MIB,), 7, dtype=torch.uint8)
    kept = []
    for _ in range(12):
        pool.step()
        kept.clear()
        kept += [data.to("cuda") for _ in range(3)]
        pool.plan_now()
    assert planned(pool, *kept) == [True] * 3
    pool.close()
    assert not mempool.torch.is_installed()
    native = native_allocations()
    others = [torch.full((MIB,), 9, dtype=torch.uint8).to("cuda") for _ in range(6)]
    assert native_allocations() - native == 6
    assert all(torch.equal(one.cpu(), data) for one in kept)
    del others
    if used == "True":  # by another stream: the memory waits for an event
        kept[0].record_stream(torch.cuda.Stream())
    kept.clear()
    torch.cuda.synchronize()
    if used == "True":
        allow(16 * MIB)  # with the arena, which native needs now
        tensor(14 * MIB)
    assert torch.cuda.memory_allocated() == 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_reserved() == 0
    assert driver().faults == []


@alone
def test_tensors_from_before_the_installation_are_freed_by_native() -> None:
    kept = [torch.full((MIB,), number, dtype=torch.uint8).to("cuda") for number in range(4)]
    pool = install()
    train(pool)
    assert [int(one.cpu()[0]) for one in kept] == [0, 1, 2, 3]
    allocated = torch.cuda.memory_allocated()
    kept.clear()
    assert torch.cuda.memory_allocated() == allocated - 4 * MIB
    assert driver().faults == []


@alone
def test_memory_without_pytorchs_cache_goes_back_to_the_device() -> None:
    pool, free = install(), torch.cuda.mem_get_info()[0]
    torch.cuda.caching_allocator_enable(False)
    kept = tensor(8 * MIB)
    torch.cuda.caching_allocator_enable(True)
    del kept
    assert torch.cuda.mem_get_info()[0] == free
    train(pool)
    assert counts(pool)["hits"] > 0


@alone
def test_options_of_the_pluggable_backend_are_refused() -> None:
    for name, value in {"limit": "1GiB", "memory": "growing", "max_reserved": "1GiB"}.items():
        with pytest.raises(UsageError, match=f"{name} is not for backend='guest'"):
            install(**{name: value})
    with pytest.raises(UsageError, match="not pluggable or guest"):
        install(backend="host")
    assert not mempool.torch.is_installed()


@alone
def test_guest_is_the_default_unless_an_option_needs_the_other_backend() -> None:
    for options, guest in (({}, True), ({"memory": "plain"}, False), ({}, False)):  # pluggable is final
        said = logged()
        pool = mempool.torch.install(device="cuda", background=False, **options)
        assert pool.can_be_shared == (not guest)
        assert (torch.cuda.get_allocator_backend(), said) == ("native" if guest else "pluggable", [])
        if guest:
            with pytest.raises(UsageError, match="is PyTorch's: to share it"):
                mempool.Pool(share=pool)
        pool.close()


@pytest.mark.parametrize("missing", ["compiler", "headers"])
@alone
def test_missing_compiler_or_headers_fall_back_to_pluggable_with_a_warning(
    missing: str, tmp_path: str
) -> None:
    os.environ["MEMPOOL_CACHE"] = tmp_path
    if missing == "compiler":
        os.environ["CXX"] = "/nonexistent/c++"
    else:
        compiled_library.CUDA_HEADERS = ("nonexistent.h",)
    said = logged()
    install()
    assert torch.cuda.get_allocator_backend() == "pluggable"
    lines = [line for line in said if "backend='pluggable'" in line]
    assert len(lines) == 1
    assert {"compiler": "/nonexistent/c++", "headers": "CUDA's headers are needed once"}[missing] in lines[0]


@alone
def test_built_guest_needs_neither_compiler_nor_headers() -> None:
    compiled_library.GUEST.build()
    os.environ["CXX"] = "/nonexistent/c++"
    compiled_library.CUDA_HEADERS = ("nonexistent.h",)
    install()
    assert torch.cuda.get_allocator_backend() == "native"


@alone
def test_unknown_release_falls_back_to_pluggable_with_a_warning() -> None:
    warnings.simplefilter("ignore")  # the version was not tested
    torch.__version__ = "2.99.0"
    said = logged()
    install()
    assert torch.cuda.get_allocator_backend() == "pluggable"
    assert [line for line in said if "does not know the allocator of PyTorch 2.99.0" in line]


@alone
def test_tensors_outlive_the_interpreter() -> None:
    pool = install(background=True)
    train(pool)
    globals()["kept"] = tensor(MIB)


@pytest.mark.parametrize(
    "check",
    [
        "record_stream",
        "graphs",
        "limits",
        "planned",
        "autograd_threads",
        "out_of_memory",
        "statistics",
        "snapshots",
        "loader",
    ],
)
@alone
def test_check_of_a_gpu_holds(check: str) -> None:
    logging.getLogger("mempool").setLevel(logging.ERROR)  # threads without order outgrow an arena
    with silent():
        checks.CHECKS[check](mempool.torch.install(device="cuda", backend="guest"))
    assert driver().faults == []


def test_run_command_serves_a_program_by_the_guest(tmp_path: Path, libraries: dict[str, str]) -> None:
    program, file = Path(__file__).with_name("programs") / "loop.py", tmp_path / "report.json"
    command = [Path(sys.executable).with_name("mempool"), "run", "--backend", "guest", "--json", file]
    environment = {"PYTHONPATH": str(Path(standin.__file__).with_name("startup")), "MEMPOOL_REMEMBER": "0"}
    done = subprocess.run(
        [*command, program, f"--report={tmp_path / 'reported'}"],
        env=os.environ | libraries | environment | {"TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "backend='pluggable'" not in done.stderr
    assert json.loads(file.read_text())["pools"]["torch"]["allocations"] > 0


if __name__ == "__main__":
    run_each_alone(globals())
