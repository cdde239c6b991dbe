"""Time of a planned CuPy buffer, compared with CuPy's objects alone and with RMM, without a GPU."""

from __future__ import annotations

import importlib.util
import statistics
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import build

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
SIZES = [100_000 + number % 4 * 512 for number in range(100)]
ROUNDS = 2000
#: Nanoseconds in excess of the cost of CuPy's own objects.
MOST = 200


@pytest.fixture(autouse=True)
def only_when_asked(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("benchmark_enable"):
        pytest.skip("a benchmark: --benchmark-enable")


class Measured(NamedTuple):
    """A statement to measure: its namespace and its setup, which precedes each hundred executions."""

    statement: str
    names: dict[str, Any]
    setup: Callable[[], Any] = lambda: None


def median_ns(*measured: Measured) -> list[float]:
    """Return the median time of each statement, less the loop; the statements take turns."""
    timers = [
        timeit.Timer(f"for s in S: {one.statement}", one.setup, globals={**one.names, "S": SIZES})
        for one in (*measured, Measured("pass", {}))
    ]
    rounds = [[timer.timeit(1) for timer in timers] for _ in range(ROUNDS)]
    *medians, loop = (statistics.median(column) for column in zip(*rounds, strict=True))
    return [1e9 * (median - loop) / len(SIZES) for median in medians]


def test_an_array_in_replay_beside_cupys_own_objects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cupy.cuda import memory
    from cupy_platform import Current, FakePlatform, make
    from pools import simulated

    current = Current(build.build_library("cupy_current", tmp_path))
    names: dict[str, Any] = {"P": memory.MemoryPointer, "M": memory.UnownedMemory, "o": object()}
    measured = {"MemoryPointer(UnownedMemory()) alone": Measured("P(M(4096, s, o, 0), 0)", names)}
    pools = [make(FakePlatform(current, lambda _: simulated(), python=python)) for python in (False, True)]
    for pool, language in zip(pools, ("C", "Python"), strict=True):
        for _ in range(60):
            pool.step()
            for size in SIZES:
                pool.malloc(size)
            pool.plan_now()
        pool.pool(0).client.set_recording(False)
        label = f"mempool, current device and stream in {language}"
        measured[label] = Measured("a(s)", {"a": pool.malloc}, pool.step)
    if importlib.util.find_spec("rmm") is not None:
        import rmm

        # RMM's allocator for CuPy without its query of the driver for the device.
        nothing = rmm.mr.CallbackMemoryResource(lambda size, stream: 4096, lambda *_: None)
        stream = rmm.pylibrmm.stream.DEFAULT_STREAM
        statement = "p = R.allocate(s, T); P(M(p, s, o, 0), 0); R.deallocate(p, s, T)"
        label = "RMM's callback in Python that does nothing"
        measured[label] = Measured(statement, {**names, "R": nothing, "T": stream})
    before = [pool.report().to_dict() for pool in pools]
    found = dict(zip(measured, median_ns(*measured.values()), strict=True))
    for pool, was in zip(pools, before, strict=True):
        now = pool.report().to_dict()
        assert now["misses"] == was["misses"]
        assert now["hits"] - was["hits"] >= ROUNDS * len(SIZES)
        pool.close()
    with capsys.disabled():
        print()
        for label, ns in found.items():
            print(f"{label:<48} {ns:7.0f} ns")
    plain, ours = list(found.values())[:2]
    assert ours - plain <= MOST
