"""Time of a NumPy array from the pool and from NumPy's own allocator, in alternating processes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest

ROUNDS = 4
#: Sizes in bytes of the arrays of `np.empty`.
SIZES = (64, 480, 1000, 8000)
WORKER = """
import json, sys, time
import numpy as np
import mempool.numpy

if sys.argv[1] == "pool":
    pool = mempool.numpy.install()


def alone(size):
    def twenty(empty=np.empty, size=size // 8):
        empty(size); empty(size); empty(size); empty(size); empty(size)
        empty(size); empty(size); empty(size); empty(size); empty(size)
        empty(size); empty(size); empty(size); empty(size); empty(size)
        empty(size); empty(size); empty(size); empty(size); empty(size)
    return twenty


def program(empty=np.empty):
    a = empty(1000); b = empty(130); c = empty(2000); d = empty(600); e = empty(20); del a
    f = empty(5000); g = empty(70); del b, c; h = empty(300); i = empty(900); j = empty(8); del d, f
    k = empty(129); l = empty(4000); m = empty(40); del g, h; n = empty(256); o = empty(3); del i, j
    p = empty(1500); q = empty(10); r = empty(700); s = empty(64); t = empty(2500)


found = {}
for name, twenty in [*((str(size), alone(size)) for size in json.loads(sys.argv[2])), ("program", program)]:
    until = time.perf_counter() + 3.0  # of these, the first half is for planning
    rounds = []
    while time.perf_counter() < until:
        began = time.perf_counter()
        for _ in range(100):
            twenty()
        rounds.append((time.perf_counter() - began) / 2000)
    half = sorted(rounds[len(rounds) // 2 :])
    found[name] = 1e9 * half[len(half) // 2]
print(json.dumps(found))
"""


@pytest.fixture(autouse=True)
def only_when_asked(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("benchmark_enable"):
        pytest.skip("a benchmark: --benchmark-enable")


def nanoseconds(allocator: str) -> dict[str, float]:
    command = [sys.executable, "-c", WORKER, allocator, json.dumps(SIZES)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def test_an_array_beside_numpys_own_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Print nanoseconds; assert no time."""
    rounds = [(nanoseconds("default"), nanoseconds("pool")) for _ in range(ROUNDS)]
    with capsys.disabled():
        print("\n| np.empty | NumPy's own, ns | mempool, ns | more |\n| --- | --- | --- | --- |")
        for name in rounds[0][0]:
            own, pool = (statistics.median(one[k][name] for one in rounds) for k in (0, 1))
            more = statistics.median(b[name] - a[name] for a, b in rounds)
            what = "of 20 sizes, some alive" if name == "program" else f"{name} bytes, again and again"
            print(f"| {what} | {own:.0f} | {pool:.0f} | {more:+.0f} |")
    assert all(seconds > 0 for pair in rounds for one in pair for seconds in one.values())
