"""Time to read a snapshot of a million events with their stacks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from snapshots import write_large

from traces.formats.snapshot import read_snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_benchmark.fixture import BenchmarkFixture


@pytest.mark.parametrize(("shared", "most_seconds"), [(True, 4), (False, 12)], ids=["shared", "own"])
def test_a_snapshot_of_a_million_events_is_read(
    benchmark: BenchmarkFixture, tmp_path: Path, shared: bool, most_seconds: float
) -> None:
    """Read snapshots whose stacks share their frames, and snapshots whose stacks do not."""
    count = 1_000_000 if benchmark.enabled else 3000
    path = tmp_path / "s"
    write_large(path, count, shared=shared)
    before = time.process_time()
    trace = benchmark.pedantic(read_snapshot, (path,), rounds=1)
    seconds = time.process_time() - before
    assert len(trace) > count // 2
    benchmark.extra_info["file_bytes"] = path.stat().st_size
    if benchmark.enabled:
        assert seconds < most_seconds
