"""NumPy's hook without NumPy, under sanitizers: see tests/native/hook_stress.cpp."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "native"))

import build  # noqa: E402


@pytest.mark.parametrize("check", [[], ["check"]], ids=["plain", "check"])
@pytest.mark.parametrize("sanitizer", ["address", pytest.param("thread", marks=pytest.mark.full)])
def test_clients_are_destroyed_while_threads_allocate(
    tmp_path_factory: pytest.TempPathFactory, sanitizer: str, check: list[str]
) -> None:
    """No use after the end of a client, all clients are destroyed in the end, and no byte is lost."""
    if not build.has_sanitizer(sanitizer):
        pytest.skip(f"{build.compiler()} cannot build and run programs with the {sanitizer} sanitizer")
    try:
        folder = ROOT / "build" / "native"
        program = build.build("hook_stress", folder, sanitizer=sanitizer)
    except OSError:  # a tree that is read-only
        program = build.build("hook_stress", tmp_path_factory.mktemp("native"), sanitizer=sanitizer)
    done = subprocess.run([program, "100", *check], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
