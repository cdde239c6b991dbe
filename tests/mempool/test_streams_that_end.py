"""Streams and threads that end, and the default stream of each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from cores import pattern
from fake_cuda import FakeCuda
from pools import simulated

from mempool import Pool, _core

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


PER_THREAD = 2
T = TypeVar("T")


def elsewhere(work: Callable[[], T]) -> T:
    """Run in a thread that ends."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


def test_each_thread_has_a_permanent_negative_stream_number() -> None:
    mine = _core.thread_stream()
    others = [elsewhere(_core.thread_stream) for _ in range(20)]
    assert _core.thread_stream() == mine
    assert len({mine, *others}) == 21
    assert max(mine, *others) < 0


def test_default_stream_of_the_own_thread_is_the_drivers_handle(fake: FakeCuda) -> None:
    calls, mine = _core.DeviceCalls(fake.device()), _core.thread_stream()
    address = calls.reserve(MIB)
    fake.write(PER_THREAD, address, 8, 1)
    event = calls.record(mine)
    assert not calls.query(event)
    assert calls.wait(mine, event)
    other = fake.stream()
    assert calls.wait(other, event)
    fake.expect(other, address, 8, 1)
    assert fake.pending(PER_THREAD) > 0
    fake.finish(PER_THREAD)
    assert calls.query(event)
    calls.forget(event)
    assert calls.synchronize()
    calls.release(address, MIB)


def test_reuse_after_another_threads_default_stream_waits_for_the_device(fake: FakeCuda) -> None:
    """An event recorded here would stand for this thread's own stream, where nothing is queued."""
    calls = _core.DeviceCalls(fake.device())
    address = calls.reserve(MIB)

    def work() -> int:
        fake.write(PER_THREAD, address, 8, 7)
        return _core.thread_stream()

    its = elsewhere(work)
    event = calls.record(its)
    assert not calls.query(event)  # unknown
    stream = fake.stream()
    assert calls.wait(stream, event)
    fake.expect(stream, address, 8, 7)
    fake.finish(stream)
    calls.forget(event)
    calls.release(address, MIB)


def test_another_threads_cannot_be_made_to_wait_so_the_caller_does(fake: FakeCuda) -> None:
    calls, stream = _core.DeviceCalls(fake.device()), fake.stream()
    address = calls.reserve(MIB)
    its = elsewhere(_core.thread_stream)
    fake.write(stream, address, 8, 7)
    event = calls.record(stream)
    assert calls.wait(its, event)
    assert fake.pending(stream) == 0
    elsewhere(lambda: fake.expect(PER_THREAD, address, 8, 7))
    calls.forget(event)
    assert calls.synchronize()
    calls.release(address, MIB)


def test_capture_state_of_another_threads_default_stream_is_unknown(fake: FakeCuda) -> None:
    calls = _core.DeviceCalls(fake.device())
    context = calls.reserve(512)  # makes one
    mine = _core.thread_stream()

    def while_capturing() -> tuple[bool, bool]:
        fake.begin_capture(PER_THREAD)
        known = calls.capturing(_core.thread_stream()), calls.capturing(mine)
        fake.end_capture(PER_THREAD)
        return known

    assert elsewhere(while_capturing) == (True, False)
    calls.release(context, 512)


@pytest.mark.parametrize("share_streams", [True, False])
def test_memory_moves_between_threads_only_after_its_work(fake: FakeCuda, share_streams: bool) -> None:
    """The device has room for one buffer: memory freed by a thread serves another when all work is done."""
    fake.set_capacity(20 * MIB)
    pool = _core.Pool(device=fake.device(), share_streams=share_streams)
    client = _core.Client(pool, "test")
    pool.set_retained_limit(1 << 40)

    def first() -> None:
        stream = _core.thread_stream()
        address = client.allocate(12 * MIB, stream)
        fake.write(PER_THREAD, address, 12 * MIB, 1)
        fake.expect(PER_THREAD, address, 12 * MIB, 1)
        assert client.free(address, stream)

    def second() -> None:
        stream = _core.thread_stream()
        address = client.allocate(12 * MIB, stream)
        assert address != 0
        fake.write(PER_THREAD, address, 12 * MIB, 2)
        fake.finish(PER_THREAD)
        assert client.free(address, stream)

    elsewhere(first)
    elsewhere(second)
