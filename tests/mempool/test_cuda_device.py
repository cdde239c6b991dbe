"""The plain CUDA device on a driver without a GPU: see tests/native/fake_cuda.cpp."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, TypeVar

import pytest
from fake_cuda import (
    DEINITIALIZED,
    GLOBAL,
    NO_DEVICE,
    NOT_INITIALIZED,
    OUT_OF_MEMORY,
    RELAXED,
    THREAD_LOCAL,
    FakeCuda,
)
from pools import run
from programs import Watched, replaced, training

from mempool import Pool, _core

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20
T = TypeVar("T")


def calls(fake: FakeCuda, index: int | None = 0) -> _core.DeviceCalls:
    return _core.DeviceCalls(fake.device(index))


def bytes_at(address: int, count: int) -> bytes:
    return ctypes.string_at(address, count)


def on_another_thread(work: Callable[[], T]) -> T:
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    thread.join()
    return answers[0]


# --- the driver


@pytest.mark.skipif(bool(_core.cuda_devices()), reason="this machine has a CUDA device")
def test_without_a_driver_there_are_no_devices_and_asking_for_one_is_a_clear_error() -> None:
    assert _core.cuda_devices() == []
    with pytest.raises(RuntimeError, match=r"libcuda\.so\.1"):
        _core.CudaDevice(0)


def test_a_library_that_is_not_there_is_named() -> None:
    assert _core.cuda_devices(driver="libno-such-cuda.so") == []
    with pytest.raises(RuntimeError, match=r"no CUDA driver: libno-such-cuda\.so"):
        _core.CudaDevice(0, driver="libno-such-cuda.so")


def test_a_symbol_that_is_missing_is_named() -> None:
    assert _core.cuda_devices(driver="libm.so.6") == []
    with pytest.raises(RuntimeError, match=r"libm\.so\.6 has no cuInit"):
        _core.CudaDevice(0, driver="libm.so.6")


def test_a_driver_that_does_not_start_says_why_and_is_asked_again(fake: FakeCuda, tmp_path: Path) -> None:
    other = FakeCuda(shutil.copy(fake.driver, tmp_path))  # one that nobody has started
    other.fail("cuInit", NO_DEVICE)
    assert _core.cuda_devices(driver=other.driver) == []
    device = other.device()
    assert _core.DeviceCalls(device).reserve(512) == 0
    assert device.errors == 1
    assert re.search(r"CUDA_ERROR_NO_DEVICE \(100\)", str(device.last_error))
    other.fail("cuInit", times=0)
    assert _core.DeviceCalls(device).reserve(512) != 0


def test_a_driver_is_started_once_and_not_before_it_is_needed(fake: FakeCuda, tmp_path: Path) -> None:
    """From then on the process's devices are chosen and its forked children have none."""
    other = FakeCuda(shutil.copy(fake.driver, tmp_path))
    devices = [other.device(index) for index in (0, 1, None)]
    assert other.calls("cuInit") == 0
    for device in devices:
        device.bind(0)
        _core.DeviceCalls(device).reserve(512)
        assert len(_core.cuda_devices(driver=other.driver)) == 2
    assert other.calls("cuInit") == 1


def test_listing_devices_and_making_one_makes_no_context(fake: FakeCuda) -> None:
    assert _core.cuda_devices(driver=fake.driver) == ["Fake GPU 0", "Fake GPU 1"]
    device = _core.DeviceCalls(fake.device())
    assert fake.primary_retained() == 0
    device.reserve(512)
    device.reserve(512)
    assert fake.primary_retained() == 1


def test_a_negative_index_is_refused(fake: FakeCuda) -> None:
    with pytest.raises(ValueError, match="negative"):
        fake.device(-1)


def test_a_device_that_is_not_there_has_no_memory(fake: FakeCuda) -> None:
    device = fake.device(2)
    assert _core.DeviceCalls(device).reserve(512) == 0
    assert "CUDA_ERROR_INVALID_DEVICE" in str(device.last_error)


# --- binding


def test_an_unbound_device_has_no_memory_until_it_is_bound_once(fake: FakeCuda) -> None:
    device = fake.device(None)
    memory = _core.DeviceCalls(device)
    assert device.index is None
    assert device.memory() == (0, 0)
    assert memory.reserve(512) == 0
    assert memory.record(0) == 0
    assert memory.synchronize()
    assert not memory.capturing(0)
    assert fake.primary_retained(0) == fake.primary_retained(1) == 0
    assert not device.bind(2)
    assert not device.bind(-1)
    assert device.bind(1)
    assert device.bind(1)
    assert not device.bind(0)
    assert device.index == 1
    address = memory.reserve(512)
    assert (fake.live_bytes(0), fake.live_bytes(1)) == (0, 512)
    memory.release(address, 512)
    assert device.errors == 0


def test_of_many_threads_that_bind_one_decides(fake: FakeCuda) -> None:
    for _ in range(50):
        device = fake.device(None)
        barrier = threading.Barrier(2)
        answers = {}

        def bind(index: int, device=device, barrier=barrier, answers=answers) -> None:  # type: ignore[no-untyped-def]
            barrier.wait()
            answers[index] = device.bind(index)

        threads = [threading.Thread(target=bind, args=(index,)) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers.values()) == [False, True]
        assert answers[device.index]


# --- memory


def test_memory_comes_from_the_device_and_goes_back(fake: FakeCuda) -> None:
    fake.set_capacity(4 * MIB)
    device = fake.device()
    memory = _core.DeviceCalls(device)
    assert (device.alignment, device.page) == (512, 0)
    address = memory.reserve(3 * MIB)
    assert device.memory() == (MIB, 4 * MIB)
    assert memory.commit(address, 3 * MIB)
    memory.decommit(address, MIB)
    assert memory.resize(address, 3 * MIB, 4 * MIB) == 0
    assert fake.live_bytes() == 3 * MIB
    assert memory.reserve(2 * MIB) == 0
    assert memory.reserve(0) == 0
    assert device.errors == 0  # to be out of memory is none
    memory.release(address, 3 * MIB)
    assert device.memory() == (4 * MIB, 4 * MIB)


def test_devices_without_a_limit_of_their_own_answer_zeros() -> None:
    for device in (_core.HostDevice(), _core.SimulatedDevice()):
        assert device.memory() == (0, 0)
        assert not _core.DeviceCalls(device).capturing(0)
        assert _core.DeviceCalls(device).synchronize()


@pytest.mark.parametrize("given", [256, 512])
@pytest.mark.parametrize("alignment", [512, 4096, 2 * MIB])
def test_addresses_are_aligned_whatever_the_driver_gives(fake: FakeCuda, given: int, alignment: int) -> None:
    fake.set_alignment(given)
    memory = calls(fake)
    addresses = [memory.reserve(10_000, alignment) for _ in range(4)]
    assert all(address != 0 and address % alignment == 0 for address in addresses)
    for address in addresses:
        memory.zero(address, 10_000)  # all of it is the device's
    assert memory.synchronize()
    for address in addresses:
        memory.release(address, 10_000)
    assert fake.live_allocations == 0


def test_an_address_that_was_moved_up_once_is_given_back_as_it_is_the_next_time(fake: FakeCuda) -> None:
    memory = calls(fake)
    seen: dict[int, set[int]] = {256: set(), 512: set()}
    for _ in range(50):
        for given in (256, 512):
            fake.set_alignment(given)
            address = memory.reserve(MIB)
            seen[given].add(address)
            memory.release(address, MIB)
    assert seen[256] & seen[512]  # or nothing has been tested
    assert fake.live_allocations == 0


def test_no_room_for_a_larger_alignment_leaves_nothing_behind(fake: FakeCuda) -> None:
    fake.set_capacity(20_000)
    assert calls(fake).reserve(10_000, 16_384) == 0
    assert fake.live_allocations == 0


def test_a_call_that_the_driver_refuses_is_counted_and_named(fake: FakeCuda) -> None:
    device = fake.device()
    assert (device.errors, device.last_error) == (0, None)
    fake.fail("cuMemAlloc_v2")
    assert _core.DeviceCalls(device).reserve(512) == 0
    assert device.errors == 1
    assert device.last_error == "CUDA_ERROR_INVALID_VALUE (1): of the fake driver"
    fake.fail("cuMemGetInfo_v2")
    assert device.memory() == (0, 0)
    assert device.errors == 2


def test_a_context_that_cannot_be_had_is_asked_for_again(fake: FakeCuda) -> None:
    device = fake.device()
    fake.fail("cuDevicePrimaryCtxRetain", OUT_OF_MEMORY, times=1)
    assert _core.DeviceCalls(device).reserve(512) == 0
    assert device.errors == 1
    assert _core.DeviceCalls(device).reserve(512) != 0


# --- the thread's context


def everything(memory: _core.DeviceCalls, stream: int) -> None:
    """Every call that the device has."""
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


def test_calls_leave_another_context_current_as_it_was(fake: FakeCuda) -> None:
    device, stream = fake.device(), fake.stream()
    for other in (fake.context(0), fake.primary(1), fake.primary(0)):
        fake.set_current(other)
        everything(_core.DeviceCalls(device), stream)
        device.memory()
        assert (fake.current, fake.context_depth) == (other, 1)
    assert device.errors == 0


def test_the_right_context_is_not_pushed_again(fake: FakeCuda) -> None:
    memory = calls(fake)
    fake.set_current(fake.primary())
    memory.reserve(512)
    assert fake.calls("cuCtxPushCurrent_v2") == 0


def test_memory_is_of_the_device_whatever_context_is_current(fake: FakeCuda) -> None:
    fake.set_current(fake.primary(0))
    calls(fake, 1).reserve(512)
    assert (fake.live_bytes(0), fake.live_bytes(1)) == (0, 512)


# --- streams and events


def test_copies_and_zeros_are_done_in_the_order_of_their_stream(fake: FakeCuda) -> None:
    memory, stream = calls(fake), fake.stream()
    address = memory.reserve(1024)
    fake.write(stream, address, 512, 7)
    memory.copy(address + 512, address, 512, stream)
    memory.zero(address, 512, stream)
    ctypes.memset(address, 1, 1024)  # nothing of that has happened yet
    fake.finish(stream)
    assert bytes_at(address, 1024) == bytes(512) + b"\x07" * 512


@pytest.mark.parametrize("default", [0, 1, 2])
def test_the_default_streams_are_the_drivers_own(fake: FakeCuda, default: int) -> None:
    memory = calls(fake)
    address = memory.reserve(512)
    memory.zero(address, 512, default)
    assert fake.pending(default) == 1
    assert fake.pending(0) == fake.pending(1) == (0 if default == 2 else 1)


def test_an_event_is_done_when_its_stream_has_come_there(fake: FakeCuda) -> None:
    memory, stream = calls(fake), fake.stream()
    event = memory.record(stream)
    assert not memory.query(event)
    fake.finish(stream)
    assert memory.query(event)
    memory.forget(event)
    assert memory.query(0)


def test_a_stream_waits_for_another_on_the_device_and_nobody_on_the_host(fake: FakeCuda) -> None:
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
    assert fake.faults == []


def test_a_forgotten_event_is_used_again_while_somebody_still_waits_for_it(fake: FakeCuda) -> None:
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


def test_events_are_as_many_as_are_used_at_one_time(fake: FakeCuda) -> None:
    memory, stream = calls(fake), fake.stream()
    for _ in range(100):
        events = [memory.record(stream) for _ in range(3)]
        assert len(set(events)) == 3
        for event in events:
            memory.forget(event)
    assert fake.calls("cuEventCreate") == fake.live_events == 3
    del memory
    assert fake.live_events == 0


def test_an_event_that_could_not_be_recorded_is_used_again(fake: FakeCuda) -> None:
    memory, stream = calls(fake), fake.stream()
    fake.fail("cuEventRecord", times=5)
    assert [memory.record(stream) for _ in range(5)] == [0] * 5
    assert memory.record(stream) != 0
    assert fake.live_events == 1


@pytest.mark.parametrize("refused", ["cuEventCreate", "cuEventRecord"])
def test_where_no_event_can_be_had_the_stream_is_waited_for(fake: FakeCuda, refused: str) -> None:
    device, stream, other = fake.device(), fake.stream(), fake.stream()
    memory = _core.DeviceCalls(device)
    address = memory.reserve(512)
    memory.zero(address, 512, stream)
    memory.zero(address, 512, other)
    fake.fail(refused)
    assert memory.record(stream) == 0
    assert (fake.pending(stream), fake.pending(other)) == (0, 1)
    assert device.errors == 1


def test_where_a_stream_cannot_be_waited_for_everything_is(fake: FakeCuda) -> None:
    memory, stream = calls(fake), fake.stream()
    memory.zero(memory.reserve(512), 512, stream)
    fake.fail("cuEventRecord")
    fake.fail("cuStreamSynchronize")
    assert memory.record(stream) == 0
    assert fake.pending(stream) == 0


def test_what_can_neither_be_recorded_nor_waited_for_is_never_called_done(fake: FakeCuda) -> None:
    memory, stream, then = calls(fake), fake.stream(), fake.stream()
    memory.zero(memory.reserve(512), 512, stream)
    for symbol in ("cuEventRecord", "cuStreamSynchronize", "cuCtxSynchronize"):
        fake.fail(symbol)
    event = memory.record(stream)
    assert event != 0
    assert not memory.query(event)
    fake.fail("cuCtxSynchronize", times=0)
    memory.wait(then, event)  # waits for everything now
    assert fake.pending(stream) == 0
    memory.forget(event)


def test_where_a_stream_cannot_wait_for_an_event_the_caller_does(fake: FakeCuda) -> None:
    memory, first, then = calls(fake), fake.stream(), fake.stream()
    event = memory.record(first)
    fake.fail("cuStreamWaitEvent")
    memory.wait(then, event)
    assert fake.pending(first) == 0
    event = memory.record(first)
    fake.fail("cuEventSynchronize")
    memory.wait(then, event)
    assert fake.pending(first) == 0


def test_synchronize_waits_for_every_stream_of_the_device(fake: FakeCuda) -> None:
    memory, streams = calls(fake), [0, fake.stream(), fake.stream()]
    for stream in streams:
        memory.zero(memory.reserve(512), 512, stream)
    assert memory.synchronize()
    assert [fake.pending(stream) for stream in streams] == [0, 0, 0]


def test_memory_stays_while_its_users_could_not_be_waited_for(fake: FakeCuda) -> None:
    memory, stream = calls(fake), fake.stream()
    address = memory.reserve(512)
    memory.zero(address, 512, stream)
    fake.fail("cuCtxSynchronize", times=1)
    assert not memory.synchronize()
    memory.release(address, 512)
    assert fake.live_allocations == 1
    assert memory.synchronize()
    assert fake.live_allocations == 0
    assert fake.faults == []


def test_a_device_that_goes_gives_back_what_it_could_not_before(fake: FakeCuda) -> None:
    memory = calls(fake)
    address = memory.reserve(512)
    fake.fail("cuCtxSynchronize", times=1)
    assert not memory.synchronize()
    memory.release(address, 512)
    del memory
    assert fake.live_allocations == 0


# --- captures of graphs


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["same thread", "another thread"])
def test_memory_can_be_had_and_given_back_during_a_capture(
    fake: FakeCuda, mode: int, elsewhere: bool
) -> None:
    captured, other = fake.stream(), fake.stream()
    device = fake.device()  # whose context is not made yet
    memory = _core.DeviceCalls(device)
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


def test_the_mode_of_the_thread_is_left_as_it_was(fake: FakeCuda) -> None:
    memory = calls(fake)
    for mode in (THREAD_LOCAL, RELAXED, GLOBAL):
        fake.exchange_mode(mode)
        everything(memory, fake.stream())
        assert fake.mode == mode


def test_a_captured_stream_is_told(fake: FakeCuda) -> None:
    memory, captured, other = calls(fake), fake.stream(), fake.stream()
    assert not memory.capturing(captured)
    fake.begin_capture(captured)
    assert memory.capturing(captured)
    assert not memory.capturing(other)
    assert not memory.capturing(0)
    fake.end_capture(captured)
    assert not memory.capturing(captured)


def test_the_legacy_stream_counts_as_captured_while_one_is_that_it_waits_for(fake: FakeCuda) -> None:
    device, captured = fake.device(), fake.stream(blocking=True)
    memory = _core.DeviceCalls(device)
    memory.reserve(512)
    fake.begin_capture(captured)
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


def test_the_legacy_stream_of_such_a_capture_waits_on_the_host(fake: FakeCuda) -> None:
    memory, captured, other = calls(fake), fake.stream(blocking=True), fake.stream()
    event = memory.record(other)
    fake.begin_capture(captured)
    memory.wait(0, event)
    assert fake.pending(other) == 0
    assert fake.end_capture(captured) > 0


def test_a_captured_event_is_not_done_and_not_asked(fake: FakeCuda) -> None:
    device, captured = fake.device(), fake.stream()
    memory = _core.DeviceCalls(device)
    fake.begin_capture(captured)
    event = memory.record(captured)
    assert event != 0
    assert not memory.query(event)
    memory.forget(event)
    assert fake.end_capture(captured) > 0
    assert not memory.query(event)  # what it stands for runs when the graph is launched
    assert device.errors == 0


def test_an_event_of_an_old_capture_is_an_ordinary_one_again(fake: FakeCuda) -> None:
    memory, captured = calls(fake), fake.stream()
    fake.begin_capture(captured)
    event = memory.record(captured)
    memory.forget(event)
    assert fake.end_capture(captured) > 0
    assert memory.record(captured) == event
    fake.finish(captured)
    assert memory.query(event)


def test_streams_of_one_capture_are_ordered_in_the_graph(fake: FakeCuda) -> None:
    device, origin, side = fake.device(), fake.stream(), fake.stream()
    memory = _core.DeviceCalls(device)
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


def test_a_stream_outside_is_not_drawn_into_a_capture(fake: FakeCuda) -> None:
    device, captured, outside = fake.device(), fake.stream(), fake.stream()
    memory = _core.DeviceCalls(device)
    fake.begin_capture(captured)
    event = memory.record(captured)
    memory.wait(outside, event)
    assert not fake.is_captured(outside)
    assert device.errors == 1
    assert "CUDA_ERROR_CAPTURED_EVENT" in str(device.last_error)
    assert fake.end_capture(captured) > 0


def test_a_captured_stream_comes_after_earlier_work_without_an_edge(fake: FakeCuda) -> None:
    device, captured, outside = fake.device(), fake.stream(), fake.stream()
    memory = _core.DeviceCalls(device)
    event = memory.record(outside)
    fake.begin_capture(captured)
    memory.wait(captured, event)
    assert fake.pending(outside) == 0
    assert device.errors == 0
    assert fake.end_capture(captured) > 0


def test_without_an_event_a_captured_stream_is_not_waited_for(fake: FakeCuda) -> None:
    memory, captured = calls(fake), fake.stream()
    fake.begin_capture(captured)
    fake.fail("cuEventCreate")
    event = memory.record(captured)
    assert event != 0
    assert not memory.query(event)
    assert fake.end_capture(captured) > 0


# --- the end of the process


def test_after_the_driver_has_shut_down_calls_do_nothing_and_complain_of_nothing(fake: FakeCuda) -> None:
    device, stream = fake.device(), fake.stream()
    memory = _core.DeviceCalls(device)
    address, event = memory.reserve(4096), memory.record(stream)
    fake.shut_down()
    assert memory.reserve(512) == 0
    assert memory.query(event)
    memory.wait(stream, event)
    assert memory.record(stream) == 0
    memory.forget(event)
    assert memory.synchronize()
    assert not memory.capturing(stream)
    memory.release(address, 4096)
    assert device.memory() == (0, 0)
    assert (device.errors, device.last_error) == (0, None)
    asked = fake.calls("cuCtxGetCurrent") + fake.calls("cuThreadExchangeStreamCaptureMode")
    everything_again = [memory.reserve(512), memory.record(stream), memory.synchronize()]
    assert everything_again == [0, 0, True]
    assert fake.calls("cuCtxGetCurrent") + fake.calls("cuThreadExchangeStreamCaptureMode") == asked


@pytest.mark.parametrize("code", [DEINITIALIZED, NOT_INITIALIZED], ids=["the end", "a forked child"])
@pytest.mark.parametrize(
    "symbol",
    [
        "cuEventQuery",
        "cuCtxSynchronize",
        "cuMemFree_v2",
        "cuStreamIsCapturing",
        "cuCtxGetCurrent",
        "cuEventRecord",
    ],
)
def test_whichever_call_notices_it_first(fake: FakeCuda, symbol: str, code: int) -> None:
    device, stream = fake.device(), fake.stream()
    memory = _core.DeviceCalls(device)
    address, event = memory.reserve(4096), memory.record(stream)
    fake.fail(symbol, code)
    assert symbol != "cuEventQuery" or memory.query(event)
    assert symbol != "cuEventRecord" or memory.record(stream) == 0
    assert memory.synchronize()
    memory.release(address, 4096)
    memory.wait(stream, event)
    memory.forget(event)
    assert not memory.capturing(stream)
    assert memory.record(stream) == 0
    assert memory.query(event)
    assert (device.errors, device.last_error) == (0, None)


def test_a_pool_on_the_device_may_outlive_the_interpreter(fake: FakeCuda) -> None:
    program = """
import sys
from mempool import Pool, _core
pool = Pool(_core.CudaDevice(0, driver=sys.argv[1]))
kept = [pool.allocate(size) for size in (100, 5000, 3 << 20)]
"""
    done = subprocess.run(
        [sys.executable, "-c", program, fake.driver], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- threads


def test_threads_that_come_first_together_make_one_context(fake: FakeCuda) -> None:
    memory = calls(fake)
    fake.slow("cuDevicePrimaryCtxRetain", 50)
    threads = [threading.Thread(target=memory.reserve, args=(512,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (fake.primary_retained(), fake.live_allocations) == (1, 4)


def test_threads_use_one_device_together(fake: FakeCuda) -> None:
    device = fake.device()
    memory = _core.DeviceCalls(device)

    def work(seed: int) -> None:
        stream, other = fake.stream(), fake.stream()
        for number in range(60):
            address = memory.reserve(1024, 4096 if number % 3 else 512)
            fake.write(stream, address, 1024, seed)
            event = memory.record(stream)
            memory.wait(other, event)
            memory.forget(event)
            fake.expect(other, address, 1024, seed)
            fake.finish(stream)
            fake.finish(other)
            memory.release(address, 1024)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (fake.live_allocations, fake.faults, device.errors) == (0, [], 0)
    assert fake.live_events <= 4
    assert fake.primary_retained() == 1


# --- under a pool


@pytest.mark.parametrize("program", [replaced, training])
def test_a_pool_on_the_device_records_plans_and_replays(
    fake: FakeCuda, program: Callable[[Watched], Callable[[int], None]]
) -> None:
    device = fake.device()
    with Pool(device, background=False) as pool:
        memory = Watched(pool)
        iteration = program(memory)
        run(pool, iteration, 12, marks=True)
        report = pool.report().to_dict()
        assert (report["state"], report["misses"]) == ("replaying", 0)
        assert report["hits"] >= 4 * 60
        memory.free_all()
    del pool, memory, iteration
    assert (device.errors, fake.faults) == (0, [])


def test_memory_of_one_stream_is_used_on_another_only_after_its_work(fake: FakeCuda) -> None:
    """Each buffer is written and read by its stream, and freed while that is queued."""
    device = fake.device()
    pool = _core.Pool(device=device)
    client = _core.Client(pool, "test")
    streams = [fake.stream(), fake.stream(), 0]
    for number in range(300):
        stream = streams[number * 7 % 3]
        size = (700, 5000, 3 * MIB, 12 * MIB)[number % 4]
        address = client.allocate(size, stream)
        assert address != 0
        fake.write(stream, address, size, number % 251)
        fake.expect(stream, address, size, number % 251)
        assert client.free(address, stream if number % 5 else streams[(number + 1) % 3])
        if number % 9 == 0:
            fake.finish(streams[number % 3])
    pool.trim()
    assert pool.release_arena()
    del client, pool
    assert (device.errors, fake.faults) == (0, [])


def test_a_page_of_small_buffers_asks_nothing_of_a_stream_that_may_be_gone(fake: FakeCuda) -> None:
    """Who trims waits for it; who takes the page later cannot."""
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
