"""Contexts, memory, streams, events and captures of a CUDA device, on a driver without a GPU."""

from __future__ import annotations

import ctypes
import threading

import pytest
from cores import pattern
from fake_cuda import (
    GLOBAL,
    OUT_OF_MEMORY,
    RELAXED,
    THREAD_LOCAL,
    FakeCuda,
    calls,
    on_another_thread,
)

from mempool import _core

MIB = 1 << 20


def bytes_at(address: int, count: int) -> bytes:
    return ctypes.string_at(address, count)


# --- the thread's context


def everything(memory: _core.DeviceCalls, stream: int) -> None:
    """Call every function of the device."""
    address = memory.reserve(4096)
    memory.zero(address, 4096, stream)
    memory.copy(address, address + 2048, 2048, stream)
    event = memory.record(stream)
    memory.query(event)
    memory.wait(stream, event)
    memory.forget(event)
    memory.capturing(stream)
    assert memory.synchronize()
    memory.release(address, 4096)


def test_calls_work_on_a_thread_without_a_context_and_leave_none(fake: FakeCuda) -> None:
    memory, stream = calls(fake), fake.stream()

    def work() -> int:
        everything(memory, stream)
        return fake.context_depth

    assert on_another_thread(work) == 0
    assert fake.faults == []


def test_calls_leave_the_current_context_unchanged(fake: FakeCuda) -> None:
    device, stream = fake.device(), fake.stream()
    fake.set_current(fake.primary())
    calls(fake, device).reserve(512)
    assert fake.calls("cuCtxPushCurrent_v2") == 0  # it is current already
    for other in (fake.context(0), fake.primary(1), fake.primary(0)):
        fake.set_current(other)
        everything(calls(fake, device), stream)
        device.memory()
        assert (fake.current, fake.context_depth) == (other, 1)
    assert device.errors == 0


def test_memory_belongs_to_the_device_whichever_context_is_current(fake: FakeCuda) -> None:
    fake.set_current(fake.primary(0))
    calls(fake, 1).reserve(512)
    assert (fake.live_bytes(0), fake.live_bytes(1)) == (0, 512)


# --- memory


def test_memory_is_taken_from_the_device_and_returned(fake: FakeCuda) -> None:
    fake.set_capacity(4 * MIB)
    device = fake.device()
    memory = calls(fake, device)
    assert (device.alignment, device.page) == (512, 0)
    address = memory.reserve(3 * MIB)
    assert device.memory() == (MIB, 4 * MIB)
    assert memory.commit(address, 3 * MIB)
    memory.decommit(address, MIB)
    assert memory.resize(address, 3 * MIB, 4 * MIB) == 0
    assert fake.live_bytes() == 3 * MIB
    assert memory.reserve(2 * MIB) == 0
    assert memory.reserve(0) == 0
    assert device.errors == 0  # out of memory is no error
    memory.release(address, 3 * MIB)
    assert device.memory() == (4 * MIB, 4 * MIB)


@pytest.mark.parametrize("given", [256, 512])
@pytest.mark.parametrize("alignment", [512, 4096, 2 * MIB])
def test_addresses_are_aligned_whatever_the_driver_returns(
    fake: FakeCuda, given: int, alignment: int
) -> None:
    fake.set_alignment(given)
    memory = calls(fake)
    addresses = [memory.reserve(10_000, alignment) for _ in range(4)]
    assert all(address != 0 and address % alignment == 0 for address in addresses)
    for address in addresses:
        memory.zero(address, 10_000)  # the whole range belongs to the device
    assert memory.synchronize()
    for address in addresses:
        memory.release(address, 10_000)
    fake.set_capacity(20_000)
    memory.reserve(10_000)
    assert memory.reserve(10_000, 16_384) == 0  # no room for a larger alignment
    assert fake.live_allocations == 1


def test_address_moved_up_for_alignment_is_freed_correctly_when_reused(fake: FakeCuda) -> None:
    memory = calls(fake)
    seen: dict[int, set[int]] = {256: set(), 512: set()}
    for _ in range(50):
        for given in (256, 512):
            fake.set_alignment(given)
            address = memory.reserve(MIB)
            seen[given].add(address)
            memory.release(address, MIB)
    assert seen[256] & seen[512]  # otherwise the test is void
    assert fake.live_allocations == 0


def test_unavailable_context_is_tried_again(fake: FakeCuda) -> None:
    device = fake.device()
    fake.fail("cuDevicePrimaryCtxRetain", OUT_OF_MEMORY, times=1)
    assert calls(fake, device).reserve(512) == 0
    assert device.errors == 1
    assert calls(fake, device).reserve(512) != 0


def test_page_of_small_buffers_uses_no_possibly_destroyed_stream(fake: FakeCuda) -> None:
    """The trim waits for the stream; a later owner of the page cannot."""
    pool = _core.Pool(device=fake.device())
    client = _core.Client(pool, "test")
    gone, keeps, comes = fake.stream(), fake.stream(), fake.stream()
    kept, freed = client.allocate(100, keeps), client.allocate(100, gone)
    assert client.free(freed, gone)
    pool.trim()
    before = fake.calls("cuEventRecord"), fake.calls("cuStreamWaitEvent")
    assert client.allocate(100, comes) == freed
    assert (fake.calls("cuEventRecord"), fake.calls("cuStreamWaitEvent")) == before
    assert client.free(freed, comes)
    assert client.free(kept, keeps)


# --- streams and events


def test_copies_and_zeros_are_done_in_the_order_of_their_stream(fake: FakeCuda) -> None:
    memory, stream = calls(fake), fake.stream()
    address = memory.reserve(1024)
    fake.write(stream, address, 512, 7)
    memory.copy(address + 512, address, 512, stream)
    memory.zero(address, 512, stream)
    ctypes.memset(address, 1, 1024)  # no queued task has run yet
    fake.finish(stream)
    assert bytes_at(address, 1024) == bytes(512) + b"\x07" * 512


def test_stream_waits_for_another_on_the_device_without_blocking_the_host(fake: FakeCuda) -> None:
    memory, first, then = calls(fake), fake.stream(), fake.stream()
    address = memory.reserve(512)
    fake.write(first, address, 512, 3)
    event = memory.record(first)
    memory.wait(then, event)
    memory.forget(event)
    fake.expect(then, address, 512, 3)
    fake.finish(then)
    assert fake.pending(first) == 2
    assert fake.pending(then) == 2
    fake.finish(first)
    assert fake.pending(then) == 0
    assert memory.query(0)  # no event
    assert fake.faults == []


def test_forgotten_event_is_reused_while_a_stream_still_waits(fake: FakeCuda) -> None:
    memory, first, then, third = calls(fake), fake.stream(), fake.stream(), fake.stream()
    event = memory.record(first)
    memory.wait(then, event)
    memory.forget(event)
    assert memory.record(third) == event
    assert not memory.query(event)
    fake.finish(third)
    fake.finish(then)
    assert fake.pending(then) == 1
    fake.finish(first)
    assert fake.pending(then) == 0


@pytest.mark.parametrize("refused", ["cuEventCreate", "cuEventRecord"])
def test_record_waits_for_the_stream_where_events_are_refused(fake: FakeCuda, refused: str) -> None:
    device, stream, other = fake.device(), fake.stream(), fake.stream()
    memory = calls(fake, device)
    address = memory.reserve(512)
    memory.zero(address, 512, stream)
    memory.zero(address, 512, other)
    fake.fail(refused)
    assert memory.record(stream) == 0
    assert (fake.pending(stream), fake.pending(other)) == (0, 1)
    assert device.errors == 1
    fake.fail("cuStreamSynchronize")
    assert memory.record(other) == 0  # waits for the whole context
    assert fake.pending(other) == 0


def test_event_neither_recorded_nor_waited_for_is_never_done(fake: FakeCuda) -> None:
    memory, stream, then = calls(fake), fake.stream(), fake.stream()
    memory.zero(memory.reserve(512), 512, stream)
    for symbol in ("cuEventRecord", "cuStreamSynchronize", "cuCtxSynchronize"):
        fake.fail(symbol)
    event = memory.record(stream)
    assert event != 0
    assert not memory.query(event)
    fake.fail("cuCtxSynchronize", times=0)
    assert memory.wait(then, event)  # waits for everything now
    assert fake.pending(stream) == 0
    memory.forget(event)


def test_host_waits_for_an_event_where_the_stream_cannot(fake: FakeCuda) -> None:
    memory, first, then = calls(fake), fake.stream(), fake.stream()
    event = memory.record(first)
    fake.fail("cuStreamWaitEvent")
    assert memory.wait(then, event)
    assert fake.pending(first) == 0
    event = memory.record(first)
    fake.fail("cuEventSynchronize")
    assert memory.wait(then, event)
    assert fake.pending(first) == 0
    event = memory.record(first)
    fake.fail("cuCtxSynchronize")
    assert not memory.wait(then, event)


def test_memory_stays_while_its_users_cannot_be_waited_for(fake: FakeCuda) -> None:
    memory, stream = calls(fake), fake.stream()
    address = memory.reserve(512)
    memory.zero(address, 512, stream)
    fake.fail("cuCtxSynchronize", times=1)
    assert not memory.synchronize()
    memory.release(address, 512)
    assert fake.live_allocations == 1
    assert memory.synchronize()
    assert fake.live_allocations == 0
    address = memory.reserve(512)
    fake.fail("cuCtxSynchronize", times=1)
    assert not memory.synchronize()
    memory.release(address, 512)
    del memory  # the end of the device returns it too
    assert fake.live_allocations == 0
    assert fake.faults == []


# --- captures of graphs


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["same thread", "another thread"])
def test_memory_can_be_had_and_given_back_during_a_capture(
    fake: FakeCuda, mode: int, elsewhere: bool
) -> None:
    captured, other = fake.stream(), fake.stream()
    device = fake.device()  # whose context is not made yet
    memory = calls(fake, device)
    fake.begin_capture(captured, mode)

    def work() -> int:
        address = memory.reserve(4096)
        memory.zero(address, 4096, other)
        event = memory.record(other)
        memory.query(event)
        device.memory()
        fake.finish(other)
        memory.release(address, 4096)
        return fake.mode

    assert (on_another_thread(work) if elsewhere else work()) == GLOBAL
    assert (device.errors, fake.live_allocations) == (0, 0)
    assert fake.end_capture(captured) > 0


def test_legacy_stream_counts_as_captured_while_a_blocking_stream_is(fake: FakeCuda) -> None:
    device, captured, other = fake.device(), fake.stream(blocking=True), fake.stream()
    memory = calls(fake, device)
    memory.reserve(512)
    earlier = memory.record(other)
    fake.begin_capture(captured)
    assert memory.capturing(captured)
    assert not memory.capturing(other)
    assert memory.wait(0, earlier)  # on the host
    assert fake.pending(other) == 0
    assert memory.capturing(0)
    assert memory.capturing(1)
    assert not memory.capturing(2)
    event = memory.record(0)
    assert event != 0
    assert not memory.query(event)
    memory.forget(event)
    assert not fake.is_broken(captured)
    assert device.errors == 0
    assert not memory.synchronize()
    assert device.errors == 1
    assert fake.end_capture(captured) > 0
    assert memory.synchronize()


def test_captured_event_is_never_done_and_not_queried_at_the_driver(fake: FakeCuda) -> None:
    device, captured = fake.device(), fake.stream()
    memory = calls(fake, device)
    fake.begin_capture(captured)
    event = memory.record(captured)
    assert event != 0
    assert not memory.query(event)
    memory.forget(event)
    assert fake.end_capture(captured) > 0
    assert not memory.query(event)  # what it stands for runs when the graph is launched
    assert device.errors == 0
    assert memory.record(captured) == event  # an ordinary event again
    fake.finish(captured)
    assert memory.query(event)
    memory.forget(event)
    fake.begin_capture(captured)
    fake.fail("cuEventCreate")
    event = memory.record(captured)
    assert event != 0
    assert not memory.query(event)
    assert fake.end_capture(captured) > 0


def test_streams_of_a_capture_are_ordered_in_the_graph(fake: FakeCuda) -> None:
    device, origin, side = fake.device(), fake.stream(), fake.stream()
    memory = calls(fake, device)
    address = memory.reserve(512)
    fake.begin_capture(origin)
    fake.fork(origin, side)
    memory.zero(address, 512, side)
    join = memory.record(side)
    memory.wait(origin, join)
    graph = fake.end_capture(origin)
    assert graph > 0
    assert device.errors == 0
    ctypes.memset(address, 1, 512)
    fake.launch(graph, origin)
    fake.finish(origin)
    assert bytes_at(address, 512) == bytes(512)
    fake.destroy_graph(graph)


def test_outside_stream_does_not_join_a_capture(fake: FakeCuda) -> None:
    device, captured, outside = fake.device(), fake.stream(), fake.stream()
    memory = calls(fake, device)
    fake.begin_capture(captured)
    event = memory.record(captured)
    assert not memory.wait(outside, event)
    assert not fake.is_captured(outside)
    assert device.errors == 1
    assert "CUDA_ERROR_CAPTURED_EVENT" in str(device.last_error)
    assert fake.end_capture(captured) > 0


def test_captured_stream_waits_for_earlier_work_on_the_host_without_an_edge(fake: FakeCuda) -> None:
    device, captured, outside = fake.device(), fake.stream(), fake.stream()
    memory = calls(fake, device)
    event = memory.record(outside)
    fake.begin_capture(captured)
    assert memory.wait(captured, event)
    assert fake.pending(outside) == 0
    assert device.errors == 0
    assert fake.end_capture(captured) > 0


# --- streams that share an arena


@pytest.mark.parametrize("wrong", ["nothing", "captured", "legacy", "driver"])
def test_arena_memory_is_not_reused_by_a_stream_unable_to_wait(fake: FakeCuda, wrong: str) -> None:
    """A capture unknown to the pool keeps a stream from waiting, and so does a failing driver."""
    device = fake.device()
    first, then = (0 if wrong == "legacy" else fake.stream()), fake.stream()
    captured = first if wrong == "captured" else fake.stream(blocking=True)
    pool = _core.Pool(device=device)
    client = _core.Client(pool, "test")
    client.load(None, pattern([4096], [0], stream=first, others=[(1, then, [4096], [0])]))
    for stream in (first, then):
        client.free(client.allocate(4096, stream), stream)
    address = client.allocate(4096, first)
    calls(fake, device).zero(address, 4096, first)
    if wrong in ("captured", "legacy"):
        fake.begin_capture(captured)
    client.free(address, first)
    if wrong == "driver":
        for symbol in ("cuStreamWaitEvent", "cuEventSynchronize", "cuCtxSynchronize"):
            fake.fail(symbol, times=1 << 20)
    again = client.allocate(4096, then)
    assert (again == address) == (wrong == "nothing")
    if wrong in ("captured", "legacy"):
        fake.end_capture(captured)
    for symbol in ("cuStreamWaitEvent", "cuEventSynchronize", "cuCtxSynchronize"):
        fake.fail(symbol, times=0)


# --- threads


def test_threads_arriving_first_together_make_a_single_context(fake: FakeCuda) -> None:
    memory = calls(fake)
    fake.slow("cuDevicePrimaryCtxRetain", 50)
    threads = [threading.Thread(target=memory.reserve, args=(512,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (fake.primary_retained(), fake.live_allocations) == (1, 4)


@pytest.mark.parametrize("trouble", ["capture", "cuEventRecord", "none"])
def test_unusable_event_delays_no_later_free(fake: FakeCuda, trouble: str) -> None:
    """The event failed to record or was captured: recording is repeated as soon as possible."""
    fake.set_capacity(100 * MIB)
    client = _core.Client(_core.Pool(device=fake.device(), share_streams=False), "test")
    client.set_retained_limit(1 << 40)
    own, other = fake.stream(), fake.stream()
    first = client.allocate(3 * MIB, own)
    if trouble == "capture":
        fake.begin_capture(other)
    elif trouble == "cuEventRecord":
        for symbol in ("cuEventRecord", "cuStreamSynchronize", "cuCtxSynchronize"):
            fake.fail(symbol, 719, times=1)
    assert client.free(first, other)
    if trouble == "capture":
        fake.destroy_graph(fake.end_capture(other))
    fake.finish(other)
    for _ in range(20):
        address = client.allocate(3 * MIB, own)
        assert address != 0
        assert client.free(address, other)
        fake.finish(other)
    client.mark(_core.Mark.STEP)
    assert client.free(client.allocate(3 * MIB, own), own)
    assert client.stats()["deferred_blocks"] == 0
    assert client.pool.stats()["reserved"]["current"] < 40 * MIB
    assert fake.calls("cuCtxSynchronize") == (trouble == "cuEventRecord")
