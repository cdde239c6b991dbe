"""The driver's start, shutdown and devices; fallback memory of each kind."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cores import pattern
from fake_cuda import (
    DEINITIALIZED,
    KINDS,
    NOT_INITIALIZED,
    FakeCuda,
    calls,
)

from mempool import UsageError, _core, cuda
from mempool.cuda_callbacks import CallbackPool
from mempool.cupy.platform import Cuda
from mempool.pinned import PinnedPool
from mempool.settings import EVERYTHING

MIB = 1 << 20


# --- the driver
@pytest.mark.parametrize(
    ("driver", "says"),
    [("libno-such.so", r"no CUDA driver: libno-such\.so"), ("libm.so.6", r"libm\.so\.6 has no cuInit")],
)
def test_missing_library_or_symbol_is_named(driver: str, says: str) -> None:
    assert _core.cuda_devices(driver=driver) == []
    with pytest.raises(RuntimeError, match=says):
        _core.CudaDevice(0, driver=driver)
    for make in (PinnedPool, CallbackPool):
        with pytest.raises(UsageError, match=f"{says}.*install .*driver"):
            make(driver=driver)


def test_driver_is_started_once_and_not_before_its_first_use(fake: FakeCuda, tmp_path: Path) -> None:
    """The start fixes the devices of the process, and forked children have none."""
    other = FakeCuda(shutil.copy(fake.driver, tmp_path))
    devices = [other.device(index) for index in (0, 1, None)]
    assert other.calls("cuInit") == 0
    for device in devices:
        device.bind(0)
        calls(fake, device).reserve(512)
        assert len(_core.cuda_devices(driver=other.driver)) == 2
    assert other.calls("cuInit") == 1


def test_listing_and_making_devices_makes_no_context(fake: FakeCuda) -> None:
    assert _core.cuda_devices(driver=fake.driver) == ["Fake GPU 0", "Fake GPU 1"]
    device = calls(fake)
    assert fake.primary_retained() == 0
    with pytest.raises(ValueError, match="negative"):
        fake.device(-1)
    device.reserve(512)
    device.reserve(512)
    assert fake.primary_retained() == 1


# --- binding
def test_unbound_device_has_no_memory_until_bound_once(fake: FakeCuda) -> None:
    device = fake.device(None)
    memory = calls(fake, device)
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


def test_a_single_thread_wins_a_race_of_bindings(fake: FakeCuda) -> None:
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


# --- the end of the process
@pytest.mark.parametrize("code", [DEINITIALIZED, NOT_INITIALIZED], ids=["the end", "a forked child"])
@pytest.mark.parametrize(
    "symbol",
    [None, "cuEventQuery", "cuCtxSynchronize", "cuMemFree_v2", "cuStreamIsCapturing", "cuCtxGetCurrent"],
)
def test_calls_after_the_shutdown_of_the_driver_do_nothing_and_complain_of_nothing(
    fake: FakeCuda, symbol: str | None, code: int
) -> None:
    """Any call may notice the shutdown first; later calls skip the driver.

    With None, all functions are shut down.
    """
    device, stream = fake.device(), fake.stream()
    memory = calls(fake, device)
    address, event = memory.reserve(4096), memory.record(stream)
    if symbol is None:
        fake.shut_down()
    else:
        fake.fail(symbol, code)
    assert symbol != "cuEventQuery" or memory.query(event)
    assert memory.synchronize()
    memory.release(address, 4096)
    assert memory.wait(stream, event)
    memory.forget(event)
    assert not memory.capturing(stream)
    assert memory.query(event)
    asked = len(fake.log)
    assert (memory.reserve(512), memory.record(stream), memory.synchronize()) == (0, 0, True)
    assert device.memory() == (0, 0)
    assert len(fake.log) == asked
    assert (device.errors, device.last_error) == (0, None)


def test_pool_on_the_device_may_outlive_the_interpreter(fake: FakeCuda) -> None:
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


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (100, r"CUDA_ERROR_NO_DEVICE \(100\).*CUDA_VISIBLE_DEVICES"),
        (800, r"CUDA_ERROR_NOT_PERMITTED \(800\).*/dev/nvidia"),
        (3, r"CUDA_ERROR_NOT_INITIALIZED \(3\).*spawn"),
        (999, r"CUDA_ERROR_UNKNOWN \(999\).*nvidia-smi"),
        (719, r"CUDA_ERROR_LAUNCH_FAILED \(719\): of the fake driver$"),
    ],
)
def test_failing_driver_start_names_the_reason_and_the_remedy(
    fake: FakeCuda, tmp_path: Path, code: int, says: str
) -> None:
    """The same wherever a device is requested, and the driver is tried again the next time."""
    other = FakeCuda(shutil.copy(fake.driver, tmp_path))  # an unstarted driver
    for symbol in ("cuInit", "cuDeviceGetCount"):
        other.fail(symbol, code)
        for make in (
            lambda: cuda.check(other.device()),
            lambda: Cuda(other.driver, start=False).device(0),
            lambda: PinnedPool(driver=other.driver),
            lambda: CallbackPool(0, driver=other.driver),
        ):
            with pytest.raises(UsageError, match=f"{symbol}: {says}"):
                make()
        other.fail(symbol, times=0)
    cuda.check(other.device())


def test_fake_driver_reports_calls_from_a_wrong_context(fake: FakeCuda) -> None:
    """Other tests would not notice such calls, since the driver gives a code only."""
    driver = ctypes.CDLL(fake.driver)
    event, stream = ctypes.c_void_p(), fake.stream()
    assert driver.cuInit(0) == 0
    fake.set_current(fake.primary(0))
    assert driver.cuEventCreate(ctypes.byref(event), 2) == 0
    fake.set_current(fake.primary(1))
    assert driver.cuEventRecord(event, ctypes.c_void_p(stream)) == 0
    assert driver.cuEventRecord(event, ctypes.c_void_p(0)) != 0
    fake.set_current(0)
    assert fake.faults == ["an event is recorded on a stream of another context"]
    fake.reset()


every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_growth_on_a_captured_stream_waits_for_nothing(fake: FakeCuda, kind: str) -> None:
    """A wait would break the capture by another library, unknown to the pool."""
    pool = _core.Pool(device=fake.device(memory=kind))
    client = _core.Client(pool, "test")
    client.set_retained_limit(EVERYTHING)
    stream = fake.stream()
    for address in [client.allocate(20 * MIB, stream) for _ in range(8)]:
        client.free(address, stream)
    fake.begin_capture(stream)
    address = client.allocate(300 * MIB, stream)
    assert not fake.is_broken(stream)
    fake.end_capture(stream)
    client.free(address, stream)


@every_kind
def test_no_arena_is_taken_within_a_capture(fake: FakeCuda, kind: str) -> None:
    """The capture belongs to another library, unknown to the pool; the next iteration has the arena."""
    pool = _core.Pool(device=fake.device(memory=kind))
    client = _core.Client(pool, "test")
    stream, sizes = fake.stream(), [30 * MIB, 20 * MIB, 40 * MIB]

    def iteration() -> None:
        client.mark(_core.Mark.STEP)
        for address in [client.allocate(size, stream) for size in sizes]:
            client.free(address, stream)

    client.set_retained_limit(EVERYTHING)
    iteration()
    client.install(pattern(sizes, low_water=1, stream=stream, sequence=1))  # 0: of the marks
    fake.begin_capture(stream)
    iteration()
    assert pool.stats()["arena_bytes"] == 0
    assert not fake.is_broken(stream)
    fake.end_capture(stream)
    for _ in range(2):
        iteration()
    assert pool.stats()["arena_bytes"] >= sum(sizes)


def test_allocation_on_a_captured_stream_is_refused_and_the_pool_goes_on(fake: FakeCuda) -> None:
    """The graph would use the memory long after the memory has another owner."""
    stream, side = fake.stream(), fake.stream()
    with CallbackPool(0, driver=fake.driver, name="captured", background=False) as pool:
        before = pool.take(MIB, stream)
        fake.begin_capture(stream)
        fake.fork(stream, side)
        for captured in (stream, side):
            with pytest.raises(UsageError, match="allocate before the capture"):
                pool.take(MIB, captured)
        other = pool.take(MIB)
        pool.give(before, stream)
        assert not fake.is_broken(stream)
        fake.destroy_graph(fake.end_capture(stream))
        for address in (pool.take(MIB, stream), other):
            pool.give(address, 0)
