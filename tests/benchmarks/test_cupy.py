"""A buffer of CuPy's in replay, beside what CuPy's own objects cost alone and beside RMM's: without a GPU."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import timeit
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

import build

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
SIZES = [100_000 + number % 4 * 512 for number in range(100)]
ROUNDS = 2000
#: ns beyond what CuPy's own objects cost.
MOST = 200


@pytest.fixture(autouse=True)
def only_when_asked(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("benchmark_enable"):
        pytest.skip("a benchmark: --benchmark-enable")


def median_ns(statement: str, names: dict[str, Any], setup: Callable[[], Any] = lambda: None) -> float:
    """Of one of a hundred in a row, without the loop."""
    names["S"] = SIZES
    rounds = [timeit.Timer(f"for s in S: {code}", setup, globals=names) for code in (statement, "pass")]
    measured, loop = (statistics.median(timer.repeat(ROUNDS, 1)) for timer in rounds)
    return 1e9 * (measured - loop) / len(SIZES)


def test_an_array_in_replay_beside_cupys_own_objects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cupy.cuda import memory
    from cupy_platform import Current, FakePlatform, make
    from pools import simulated

    current = Current(build.build_library("cupy_current", tmp_path))
    names: dict[str, Any] = {"P": memory.MemoryPointer, "M": memory.UnownedMemory, "o": object()}
    alone = "P(M(4096, s, o, 0), 0)"
    found = {"MemoryPointer(UnownedMemory()) alone": median_ns(alone, names)}
    for python in (False, True):
        with make(FakePlatform(current, lambda _: simulated(), python=python)) as pool:
            for _ in range(60):
                pool.step()
                for size in SIZES:
                    pool.malloc(size)
                pool.plan_now()
            pool.pool(0).client.set_recording(False)
            before = pool.report().to_dict()
            label = "mempool, current device and stream in " + ("Python" if python else "C")
            found[label] = median_ns("a(s)", {"a": pool.malloc}, pool.step)
            after = pool.report().to_dict()
            assert after["misses"] == before["misses"]
            assert after["hits"] - before["hits"] >= ROUNDS * len(SIZES)
    with capsys.disabled():
        print()
        for label, ns in found.items():
            print(f"{label:<48} {ns:7.0f} ns")
    plain, ours = list(found.values())[:2]
    assert ours - plain <= MOST


def test_rmms_way_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    """What its allocator for CuPy does, over a resource in Python that does nothing."""
    rmm = pytest.importorskip("rmm", reason="RMM is not installed")
    from cupy.cuda import memory

    resource = rmm.mr.CallbackMemoryResource(lambda size, stream: 4096, lambda pointer, size, stream: None)
    try:
        rmm.mr.set_current_device_resource(resource)
        names = {"B": rmm.DeviceBuffer, "P": memory.MemoryPointer, "M": memory.UnownedMemory}
        statement = "b = B(size=s); P(M(b.ptr, b.size, b, 0), 0)"
        ns = median_ns(statement, names)
    except Exception as error:  # it asks the driver for the current device
        pytest.skip(f"RMM does nothing without a driver: {error}")
    with capsys.disabled():
        print(f"\n{'RMM, a buffer by a callback in Python':<48} {ns:7.0f} ns")
