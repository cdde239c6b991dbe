"""Fixtures of the pool's tests."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from fake_cuda import FakeCuda
from pools import simulated

import build
from mempool import Pool, _core
from mempool.planning.options import OPTIONS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cupy_platform import Current


@pytest.fixture(autouse=True)
def plans_of_little_memory() -> Iterator[None]:
    """Let threads plan for little host memory, since tests hold little."""
    with mock.patch.dict(vars(OPTIONS), min_host_bytes=0):
        yield


#: Counts of objects before and after each test that left objects behind.
left: dict[str, tuple[dict[str, int], dict[str, int]]] = {}


#: The fake driver of the test that runs, if it has one.
drivers: list[FakeCuda] = []


def _on_gpu(fake: FakeCuda | None) -> dict[str, int]:
    """Return the bytes still held on the fake GPU, except by a test that returns memory by hand."""
    if fake is None or fake.by_hand:
        return dict.fromkeys(("GPU allocations", "GPU memories", "GPU streams"), 0)
    return {
        "GPU allocations": fake.live_allocations,
        "GPU memories": fake.live_memories,
        "GPU streams": fake.live_streams,
    }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Assert that no test leaves a pool, client, plan, segment or reserved address space behind.

    Objects held by the traceback of a failed test are not waited for. pytest calls this for the tests of all
    folders; those of PyTorch keep tensors from one test to the next.
    """
    if HERE not in item.path.parents:
        return (yield)
    before = _core.live_objects()
    failed = item.session.testsfailed
    result = yield
    deadline = time.monotonic() + (60 if item.session.testsfailed == failed else 1)
    while (after := _core.live_objects()) != before and time.monotonic() < deadline:
        gc.collect()  # threads that have just been told to end hold theirs for a moment
        if not _core.numpy_hook().serving():  # whoever made it: tests of the hook do without mempool.numpy
            _core.numpy_hook().held()  # releases stopped clients without arrays
        time.sleep(0.01)
    before_gpu, after_gpu = dict.fromkeys(_on_gpu(None), 0), _on_gpu(drivers.pop() if drivers else None)
    before, after = {**before, **before_gpu}, {**after, **after_gpu}
    if any(after[kind] > before[kind] for kind in after):
        left[item.nodeid] = before, after
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, (before, after) in left.items():
        terminalreporter.write_line(f"LEFT BEHIND by {name}: {before} before, {after} after", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(simulated(), background=False) as made:
        yield made


@pytest.fixture(scope="session")
def fake_library(folder: Path) -> Path:
    return build.build_driver(folder)


@pytest.fixture(scope="session")
def current_library(folder: Path) -> Path:
    return build.build_library("cupy_current", folder)


@pytest.fixture
def current(current_library: Path) -> Iterator[Current]:
    """CuPy's current device and stream, initially 0."""
    from cupy_platform import Current

    current = Current(current_library)
    current.set()
    yield current
    current.set()


@pytest.fixture
def fake(fake_library: Path) -> Iterator[FakeCuda]:
    """A CUDA driver with two unused devices; pools leave nothing there."""
    fake = FakeCuda(fake_library)
    drivers.append(fake)
    yield fake
    assert fake.faults == []
