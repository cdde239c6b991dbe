"""CuPy's allocator without CuPy, under sanitizers: see tests/native/cupy_calls.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "native"))

import build  # noqa: E402


def calls(
    folder: Path, sanitizer: str, kind: str, rounds: int, *stay: str
) -> subprocess.CompletedProcess[str]:
    if not build.has_sanitizer(sanitizer):
        pytest.skip(f"{build.compiler()} cannot build and run programs with the {sanitizer} sanitizer")
    module = build.build_module("cupy_module", folder, sanitizer=sanitizer)
    driver = build.build_driver(folder, sanitizer=sanitizer)
    leaks = "detect_leaks=0" if stay else "detect_leaks=1:fast_unwind_on_malloc=0:malloc_context_size=12"
    environment = {
        "LD_PRELOAD": build.runtimes(sanitizer),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": f"handle_sigill=1:{leaks}",
        "LSAN_OPTIONS": "exitcode=0",  # Python may leave something of its own behind
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    python = str(Path(sys.executable).resolve())  # what is preloaded must not meet a shell script
    script = str(ROOT / "tests" / "native" / "cupy_calls.py")
    return subprocess.run(
        [python, "-P", script, str(module), str(driver), "0", str(rounds), kind, *stay],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        errors="replace",
    )


@pytest.mark.parametrize("kind", ["plain", "growing", "managed"])
@pytest.mark.parametrize("sanitizer", ["address", pytest.param("thread", marks=pytest.mark.full)])
def test_buffers_of_threads_streams_and_devices_keep_every_invariant(
    folder: Path, sanitizer: str, kind: str
) -> None:
    """No buffer is reused while a stream is at work on the memory, and none loses memory or owner."""
    done = calls(folder, sanitizer, kind, 2)
    assert (done.returncode, done.stdout) == (0, "holds\n"), done.stderr[-3000:]
    assert [leak for leak in done.stderr.split("\n\n") if "leak of" in leak and "mempool::" in leak] == []


@pytest.mark.parametrize("sanitizer", ["address", pytest.param("thread", marks=pytest.mark.full)])
def test_buffers_may_live_until_the_interpreter_ends(folder: Path, sanitizer: str) -> None:
    done = calls(folder, sanitizer, "plain", 0, "stay")
    assert (done.returncode, done.stdout, done.stderr) == (0, "holds\n", "")
