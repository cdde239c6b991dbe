"""Kernel mappings and internal tables of the core stay bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from mempool import _core


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_pages_given_back_between_live_buffers_do_not_become_mappings() -> None:
    pool = _core.Pool(device=_core.HostDevice())
    client = _core.Client(pool, "test")
    buffers = [client.allocate(4096) for _ in range(20_000)]
    before, reserved = mappings(), pool.stats()["reserved"]["current"]
    for buffer in buffers[::2]:
        client.free(buffer)
    pool.trim()
    assert pool.stats()["reserved"]["current"] < 0.6 * reserved
    assert mappings() - before < 500
    again = [client.allocate(4096) for _ in range(10_000)]
    for buffer in buffers[1::2] + again:
        assert client.free(buffer)


def test_hole_search_is_bounded_and_resumes_where_the_last_search_stopped() -> None:
    """A search looks at a bounded number of ranges, and wraps around at the end."""
    guard = _core.Occupancy()
    for begin in range(0, 1 << 20, 256):
        guard.take(begin, begin + 192)
    limit = 1 << 20
    found = set()
    for _ in range(200):
        begin = guard.find_hole(64, 64, limit - 64)
        if begin == limit - 64:
            continue
        assert guard.is_free(begin, begin + 64)
        found.add(begin)
    assert len(found) >= 8
    guard.release(512 * 256)
    assert any(guard.find_hole(200, 64, limit - 64) == 512 * 256 - 64 for _ in range(64))
