"""The pool's checks of a GPU that read no computed value, on PyTorch's CUDA build and the stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mempool.errors import UsageError
from mempool.rehearsal import Machine, standin

CHECKS = Path(__file__).parents[1] / "gpu" / "checks.py"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process on the stand-in."""
    try:
        installation = standin.find_installation()
    except UsageError:
        pytest.skip("no CUDA build of PyTorch is installed")
    folder = tmp_path_factory.mktemp("libraries")
    standin.write_libraries(folder, installation)
    return os.environ | {
        "PYTHONPATH": str(Path(standin.__file__).with_name("startup")),
        standin.FOLDER: str(folder),
        standin.SETTINGS: Machine().settings(installation),
    }


@pytest.mark.parametrize("check", ["statistics", "snapshots", "limits", "planned", "background"])
@pytest.mark.parametrize("memory", ["plain", "growing"])
def test_check_of_a_gpu_holds_on_the_standin(environment: dict[str, str], check: str, memory: str) -> None:
    done = subprocess.run(
        [sys.executable, str(CHECKS), check],
        env=environment | {"MEMPOOL_MEMORY": memory},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("holds\n", 0), done.stderr[-2000:]
