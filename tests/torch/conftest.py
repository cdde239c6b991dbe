"""The observer's library, and processes that train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes import told_by

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent


@pytest.fixture(scope="session")
def observer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The library that watches addresses, built."""
    sys.path.insert(0, str(TESTS / "native"))
    import build

    library = tmp_path_factory.mktemp("observer") / "observer.so"
    source = TESTS / "native" / "torch_observer.cpp"
    command = [build.compiler(), "-std=c++17", "-O2", "-fPIC", "-shared", str(source), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    return str(library)


@pytest.fixture(scope="session")
def trained() -> Callable[..., dict[str, Any]]:
    """What a training process of its own says: ``trained("pool", model="gpt", ...)``."""

    def run(way: str, **setup: Any) -> dict[str, Any]:
        return told_by(HERE / "training.py", way, json.dumps(setup))

    return run
