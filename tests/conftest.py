"""Configuration of all tests; fail if Python finds other copies than the installed packages."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from hypothesis import HealthCheck

if TYPE_CHECKING:
    from collections.abc import Iterator

    from answers import Cli

ROOT = Path(__file__).parents[1]
PACKAGES = ("traces", "solvers", "mempool")
#: Waiting threads of BLAS and OpenMP spin, which takes two thirds of the processor time on a busy machine.
#: With several threads of BLAS, the order of additions, and so the rounding, depends on the machine.
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def pytest_configure(config: pytest.Config) -> None:
    """Import the native modules first, so that a wrong copy gives a single error.

    No property fails by the clock: the machine may be busy. Nor by chance: examples are the same each time,
    unless a seed is given (``--hypothesis-seed=7``). The long form of the tests tries more of them, and
    others each time. Examples may share a fixture, such as a folder in which each overwrites the same file.
    """
    full = "full" in config.option.markexpr.replace("not full", "")
    seeded = config.getoption("--hypothesis-seed", None) is not None
    hypothesis.settings.register_profile(
        "untimed",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        max_examples=200 if full else 25,
        database=None,
        derandomize=not (full or seeded),
        print_blob=True,
    )
    hypothesis.settings.load_profile("untimed")
    for name, value in THREADS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MEMPOOL_REMEMBER", "0")  # plans of earlier runs would change results
    for package in PACKAGES:
        try:
            importlib.import_module(f"{package}._core")
        except ImportError as error:
            raise pytest.UsageError(_advice(package, error)) from None


def pytest_report_header() -> str:
    """Return the path of the tested copy."""
    found = Path(sys.modules["mempool"].__file__ or "").parent
    if found == ROOT / "mempool":
        return f"mempool: {found} (editable)"
    return f"mempool: {found} (installed; changes in {ROOT} count after the next install)"


@pytest.fixture(scope="session", autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run in an empty folder, since a child `python -c` has its current folder first on sys.path."""
    with contextlib.chdir(tmp_path_factory.mktemp("elsewhere")):
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that caches object files between runs.

    A temporary folder if the tree is read-only.
    """
    kept = ROOT / "build" / "native"
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError:
        return tmp_path_factory.mktemp("native")
    return kept if os.access(kept, os.W_OK) else tmp_path_factory.mktemp("native")


def _advice(package: str, error: ImportError) -> str:
    if str(ROOT) not in [str(Path(place).resolve()) for place in sys.path]:
        return f"not installed in {sys.prefix}: {error}; try {sys.executable} -m pip install '.[test]'"
    return (
        f"{ROOT} comes first on sys.path, so its folder {package}/ hides the installed package, and only "
        "it has the compiled module. Run plain `pytest`, not `python -m pytest`, and without PYTHONPATH, or "
        "install by `pip install -e .`"
    )


@pytest.fixture(scope="session", autouse=True)
def signals_end_a_program() -> None:
    """Restore default signal handlers of child processes, also under nohup or in a shell's background."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    from answers import Cli

    return Cli(capsys)
