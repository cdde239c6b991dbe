"""Streams and threads that end: their free memory serves others, and no table grows."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cores import pattern
from pools import simulated

from mempool import Pool

if TYPE_CHECKING:
    from fake_cuda import FakeCuda

MIB = 1 << 20


def held(pool: Pool) -> int:
    return int(pool.core.stats()["reserved"]["current"])


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("memory", ["plain", "growing"])
def test_free_memory_of_ended_streams_serves_the_next(fake: FakeCuda, memory: str) -> None:
    with Pool(fake.device(memory=memory), mode="record", background=False) as pool:
        for _ in range(50):
            stream = fake.stream()
            for address in [pool.allocate(64 * MIB, stream=stream) for _ in range(4)]:
                fake.write(stream, address, 4096, 7)
                pool.free(address, stream=stream)
        assert held(pool) <= 512 * MIB  # twice what was ever in use


def test_device_is_waited_for_before_reuse_across_streams(fake: FakeCuda) -> None:
    with Pool(fake.device(), mode="record", background=False) as pool:
        streams = [fake.stream() for _ in range(4)]
        for stream in streams:
            address = pool.allocate(256 * MIB, stream=stream)
            fake.write(stream, address, 4096, 7)
            pool.free(address, stream=stream)
        assert held(pool) == 512 * MIB
        assert all(fake.pending(stream) == 0 for stream in streams[:2])


@pytest.mark.parametrize("streams", [2, 5])
def test_permanent_streams_soon_keep_their_own_memory(fake: FakeCuda, streams: int) -> None:
    with Pool(fake.device(), mode="record", background=False) as pool:
        handles = [fake.stream() for _ in range(streams)]

        def turns(count: int) -> None:
            for _ in range(count):
                for stream in handles:
                    pool.free(pool.allocate(256 * MIB, stream=stream), stream=stream)

        turns(10)
        before = fake.calls("cuCtxSynchronize"), fake.calls("cuMemAlloc_v2")
        turns(20)
        assert (fake.calls("cuCtxSynchronize"), fake.calls("cuMemAlloc_v2")) == before


def test_pages_of_small_buffers_serve_the_next() -> None:
    with Pool(simulated(), mode="record", background=False) as pool:
        for stream in range(2000):
            pool.free(pool.allocate(100, stream=stream), stream=stream)
        assert held(pool) <= 4 * MIB


def test_tables_do_not_grow_and_the_plan_of_permanent_streams_holds() -> None:
    with Pool(simulated(), background=False) as pool:
        pool.client.load(None, pattern([MIB, 4096]))
        before = 0

        def iteration() -> int:
            pool.step()
            for address in [pool.allocate(size) for size in (MIB, 4096)]:
                pool.free(address)
            return int(pool.report().to_dict()["hits_total"])

        iteration()
        for stream in range(1, 4000):
            pool.free(pool.allocate(100_000, stream=stream), stream=stream)
            if stream == 1000:
                before = resident()
            hits = iteration()
        assert hits == 2 * 4000
        assert pool.client.state()["sequences"] < 300
        assert resident() - before < 8 * MIB


def test_ended_threads_leave_their_table_entries_to_others() -> None:
    with Pool(simulated(), background=False) as pool:

        def work(stream: int) -> None:
            for _ in range(3):
                pool.free(pool.allocate(100_000, stream=stream), stream=stream)

        for number in range(600):
            thread = threading.Thread(target=work, args=(-10 - number,))
            thread.start()
            thread.join()
        assert pool.client.state()["sequences"] < 300


def test_cached_sequence_of_a_thread_is_checked_after_reuse_of_its_entry() -> None:
    """The thread's next buffer belongs to the thread's stream, though the entry has another stream."""
    with Pool(simulated(), mode="record", background=False) as pool:
        go, gone = threading.Event(), threading.Event()
        kept: list[int] = []

        def slow() -> None:
            pool.free(pool.allocate(100_000, stream=7), stream=7)
            gone.set()
            go.wait(60)
            kept.append(pool.allocate(200_000, stream=7))

        thread = threading.Thread(target=slow)
        thread.start()
        gone.wait(60)
        for stream in range(100, 600):
            pool.free(pool.allocate(100_000, stream=stream), stream=stream)
        go.set()
        thread.join()
        assert not pool.client.use(kept[0], 7), "its own"
        pool.free(kept[0], stream=7)
