"""Tests of ``mempool run`` with CuPy programs, without a GPU and with a stand-in driver."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from commands import MEMPOOL, outcome, start, write

from mempool import _core

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")


@pytest.mark.skipif(bool(_core.cuda_devices()), reason="this machine has a CUDA device")
def test_program_without_a_gpu_runs_as_without_the_pool(tmp_path: Path) -> None:
    write(
        tmp_path / "program.py",
        """
        import sys
        import cupy
        print(type(cupy.cuda.get_allocator()).__name__)
        try:
            cupy.zeros(10)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            print(error)
        sys.exit(3)
        """,
    )
    plain = outcome(start(tmp_path, "program.py"))
    ours = outcome(start(tmp_path, *MEMPOOL, "--json", "report.json", "program.py"))
    assert (ours.stdout, ours.status) == (plain.stdout, plain.status)
    assert "cupy" not in ours.stderr
    assert list(json.loads((tmp_path / "report.json").read_text())["pools"]) == ["numpy"]


def test_pool_is_installed_without_starting_the_driver(tmp_path: Path, fake_library: Path) -> None:
    """Programs choose their devices and fork between the import and the first array."""
    (tmp_path / "libcuda.so.1").symlink_to(fake_library)
    write(
        tmp_path / "program.py",
        """
        import ctypes
        import cupy
        import mempool.cupy
        calls = ctypes.CDLL("libcuda.so.1").fake_calls(b"cuInit")
        print(calls, cupy.get_default_memory_pool() is mempool.cupy.installed() is not None)
        """,
    )
    command = (*MEMPOOL, "--json", "report.json", "program.py")
    done = outcome(start(tmp_path, *command, LD_LIBRARY_PATH=str(tmp_path)))
    assert (done.status, done.stdout) == (0, "0 True\n"), done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["pools"]["cupy"]["allocations"] == 0


def test_cupy_program_is_replayed_and_reported(
    tmp_path: Path, fake_library: Path, current_library: Path
) -> None:
    (tmp_path / "libcuda.so.1").symlink_to(fake_library)
    write(
        tmp_path / "program.py",
        f"""
        import sys, time
        from unittest import mock
        sys.path.append({str(SUPPORT)!r})
        import numpy
        from mempool.cupy import platform  # what tells the current device, before the program imports CuPy
        from pathlib import Path
        class Now:
            def current(self):
                from cupy_platform import Current
                return Current(Path({str(current_library)!r})).capsules()
        with mock.patch.object(platform.Cuda, "current", Now.current):
            import cupy
        end = time.monotonic() + 60
        import mempool.cupy
        pool = mempool.cupy.installed()
        while pool.report().values.get("hits", 0) < 100 and time.monotonic() < end:
            first, second = cupy.ndarray((100_000,), "f4"), cupy.ndarray((200_000,), "f4")
            del first
            third = cupy.ndarray((300_000,), "f4")
            del second, third
            pool.step()
        """,
    )
    command = (*MEMPOOL, "--json", "report.json", "--record", "run.trace", "program.py")
    done = outcome(start(tmp_path, *command, LD_LIBRARY_PATH=str(tmp_path)))
    assert done.status == 0, done.stderr
    assert "mempool: cupy" in done.stderr
    report = json.loads((tmp_path / "report.json").read_text())["pools"]["cupy"]
    assert report["hits"] >= 100
    assert report["hit_rate"] == 1.0
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run.trace"]
