"""Processes with PyTorch's CUDA build on the stand-in.

Queues run late, copies move bytes, and it is a fault if copies or fills of two streams use the same memory
without an order.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import forking

from mempool.errors import UsageError
from mempool.hardware.gpu_memory import card
from mempool.rehearsal import Machine, compilation, standin


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process on the stand-in."""
    try:
        installation = standin.find_installation()
    except UsageError:
        pytest.skip("no CUDA build of PyTorch is installed")
    folder = tmp_path_factory.mktemp("libraries")
    standin.write_libraries(folder, installation)
    settings = Machine(card("H100"), devices=2, values="copied").settings(installation)
    settings += ",queues=late,arguments=/dev/null"
    compiler = compilation.environment(folder / standin.DRIVER)
    return {standin.FOLDER: str(folder), standin.SETTINGS: settings, **compiler}


@pytest.fixture
def without_triton(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide Triton from programs, which then are not compiled."""
    folder = tmp_path_factory.mktemp("without-triton")
    (folder / "sitecustomize.py").write_text('import sys\nsys.modules["triton"] = None\n')
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.fixture(scope="module")
def forking_process(
    request: pytest.FixtureRequest, libraries: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A process that has imported PyTorch, and forks for each separate test of a file."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in libraries.items():
            patch.setitem(os.environ, name, value)
        with forking(request.path, startup=Path(standin.__file__).with_name("startup")) as server:
            yield server
