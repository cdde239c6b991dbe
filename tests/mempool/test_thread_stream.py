"""Per-thread default stream: one handle, and another stream in each thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import pytest

from mempool import _core

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_cuda import FakeCuda

MIB = 1 << 20
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
    assert not calls.query(event)  # nobody knows
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
