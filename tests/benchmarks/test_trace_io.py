"""Time to write a million events to a file and to read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from traces import Trace
from traces.formats.parquet import read_trace, write_trace

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_benchmark.fixture import BenchmarkFixture


def million_events() -> Trace:
    """Return a trace with streams, threads, times and names; buffers live for a few thousand events."""
    n = 500_000
    rng = np.random.default_rng(0)
    birth = np.arange(n, dtype=np.float64)
    at = np.concatenate([birth, birth + rng.exponential(2000, n) + 0.5])
    order = np.argsort(at, kind="stable")
    return Trace.of(
        np.repeat(np.array([0, 1], np.uint8), n)[order],
        np.tile(np.arange(n), 2)[order],
        np.concatenate([rng.choice(np.arange(1, 2000) * 512, n), np.zeros(n, np.int64)])[order],
        stream=rng.integers(0, 4, 2 * n),
        thread=rng.integers(0, 4, 2 * n),
        time_ns=np.cumsum(rng.integers(50, 5000, 2 * n)) + 1_700_000_000_000_000_000,
        operation=rng.integers(-1, 100, 2 * n),
        frame=rng.integers(-1, 1000, 2 * n),
        names=[f"train.py:{i}" for i in range(1000)],
    )


def test_a_million_events_are_written_and_read_back(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    trace = million_events()
    path = tmp_path / "trace.parquet"

    def there_and_back() -> Trace:
        write_trace(trace, path)
        return read_trace(path)

    back = benchmark.pedantic(there_and_back, rounds=5, warmup_rounds=1)
    np.testing.assert_array_equal(back.time_ns, trace.time_ns)
    benchmark.extra_info["file_bytes"] = path.stat().st_size
    if benchmark.enabled:
        assert benchmark.stats.stats.median < 2
