"""RMM's resource on a fake driver: streams, errors, state after closing, and memory shared with others."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda

pytest.importorskip("rmm.mr", reason="RMM is not installed")

import rmm
from rmm.pylibrmm.stream import DEFAULT_STREAM, LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, Stream

import mempool.rmm
from mempool import Pool, UsageError
from mempool.cuda_callbacks import CallbackPool

MIB = 1 << 20
PER_THREAD = 2


class Handle:
    """A foreign stream handle, in the form that RMM accepts."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@pytest.fixture
def pool(fake: FakeCuda) -> Iterator[mempool.rmm.RmmPool]:
    with mempool.rmm.install(driver=fake.driver, background=False) as installed:
        yield installed


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Forget RMM resources after each test; otherwise they are kept for ever."""
    yield
    mempool.rmm._kept.clear()
    gc.collect()


def current() -> Any:
    return rmm.mr.get_per_device_resource(0)


def test_install_sets_the_device_resource_and_close_restores_the_former(fake: FakeCuda) -> None:
    before = current()
    with mempool.rmm.install(driver=fake.driver, background=False) as pool:
        assert isinstance(current(), rmm.mr.CallbackMemoryResource)
        assert mempool.rmm.installed() is pool
    assert current() is before


def test_close_keeps_a_resource_set_by_the_program(fake: FakeCuda) -> None:
    before = current()
    pool = mempool.rmm.install(driver=fake.driver, background=False)
    mine = rmm.mr.CudaMemoryResource()
    rmm.mr.set_per_device_resource(0, mine)
    pool.close()
    assert current() is mine
    rmm.mr.set_per_device_resource(0, before)


def test_each_device_has_a_pool_of_its_own(fake: FakeCuda) -> None:
    before = [rmm.mr.get_per_device_resource(index) for index in (0, 1)]
    pools = [mempool.rmm.install(index, driver=fake.driver, background=False) for index in (0, 1)]
    assert [mempool.rmm.installed(index) for index in (0, 1, 2)] == [*pools, None]
    with pytest.raises(
        UsageError, match=r"RMM's device 1 has a pool already: mempool\.rmm\.uninstall\(1\) it"
    ):
        mempool.rmm.install(1, driver=fake.driver, background=False)
    for index, pool in enumerate(pools):
        resource = rmm.mr.get_per_device_resource(index)
        where = resource.allocate(MIB)
        assert (fake.live_bytes(index) > 0, pool.core.owns(where)) == (True, True)
        resource.deallocate(where, MIB)
    mempool.rmm.uninstall(1)
    assert mempool.rmm.installed() is pools[0]
    mempool.rmm.uninstall()
    assert [rmm.mr.get_per_device_resource(index) for index in (0, 1)] == before


def test_freed_memory_serves_the_next_request_of_its_stream(
    fake: FakeCuda, pool: mempool.rmm.RmmPool
) -> None:
    stream = Stream(Handle(fake.stream()))
    where = current().allocate(MIB, stream)
    assert where % 256 == 0
    reserved = pool.core.stats()["reserved"]["current"]
    current().deallocate(where, MIB, stream)
    assert current().allocate(MIB, stream) == where
    current().deallocate(where, MIB, stream)
    assert pool.core.stats()["reserved"]["current"] == reserved
    assert pool.client.stats()["blocks"]["current"] == 0


def test_both_handles_of_the_default_stream_share_memory(pool: mempool.rmm.RmmPool) -> None:
    where = current().allocate(MIB, DEFAULT_STREAM)
    current().deallocate(where, MIB, LEGACY_DEFAULT_STREAM)
    assert current().allocate(MIB, LEGACY_DEFAULT_STREAM) == where
    current().deallocate(where, MIB, DEFAULT_STREAM)


def test_plan_from_a_file_takes_effect_once_a_device_is_chosen(fake: FakeCuda, tmp_path: Path) -> None:
    with Pool(fake.device(), wait_bytes="never", background=False) as trained:
        for _ in range(6):
            trained.step()
            trained.free(trained.allocate(MIB))
            trained.plan_now()
        trained.save(tmp_path / "a.plan")
    with CallbackPool(
        None, driver=fake.driver, plan=tmp_path / "a.plan", name="late", background=False
    ) as late:
        mempool.rmm.install(0, share=late, background=False).close()
        late.step()
        late.give(late.take(MIB), 0)
        assert late.report().to_dict()["hits"] == 1


def test_out_of_memory_is_a_memory_error_with_the_numbers(fake: FakeCuda, pool: mempool.rmm.RmmPool) -> None:
    fake.set_capacity(64 * MIB)
    with pytest.raises(MemoryError, match="134,217,728 bytes asked for"):
        current().allocate(128 * MIB)
    where = current().allocate(MIB)
    current().deallocate(where, MIB)


def test_driver_errors_other_than_out_of_memory_are_runtime_errors(
    fake: FakeCuda, pool: mempool.rmm.RmmPool
) -> None:
    """Callers retry out-of-memory errors without end."""
    fake.fail("cuMemAlloc_v2", 719)
    with pytest.raises(RuntimeError, match=r"cuMemAlloc_v2 .*CUDA_ERROR_LAUNCH_FAILED"):
        current().allocate(32 * MIB)
    fake.fail("cuMemAlloc_v2", 719, times=0)
    current().deallocate(current().allocate(32 * MIB), 32 * MIB)


def test_allocation_on_a_captured_stream_is_an_error_and_the_pool_goes_on(
    fake: FakeCuda, pool: mempool.rmm.RmmPool
) -> None:
    captured = fake.stream()
    stream = Stream(Handle(captured))
    current().deallocate(current().allocate(MIB, stream), MIB, stream)
    fake.begin_capture(captured)
    with pytest.raises(RuntimeError, match="allocate before the capture"):
        current().allocate(MIB, stream)
    fake.destroy_graph(fake.end_capture(captured))
    current().deallocate(current().allocate(MIB, stream), MIB, stream)


@pytest.mark.parametrize(
    ("index", "memory", "problem"),
    [
        (7, "plain", "no CUDA device 7"),
        ("0", "plain", "not the number of a device"),
        (0, "growing", "has no growing memory"),
    ],
)
def test_missing_devices_and_features_are_refused_at_install(
    fake: FakeCuda, index: Any, memory: str, problem: str
) -> None:
    fake.set_attribute(102, 0)  # growing memory
    with pytest.raises(UsageError, match=problem):
        mempool.rmm.install(index, driver=fake.driver, memory=memory)
    assert mempool.rmm.installed() is None


def test_buffers_outlive_the_pool(pool: mempool.rmm.RmmPool) -> None:
    resource = current()
    where = resource.allocate(MIB)
    pool.close()
    resource.deallocate(where, MIB)
    resource.deallocate(resource.allocate(MIB), MIB)
    assert pool.client.stats()["blocks"]["current"] == 0


def test_limiting_adaptor_works_above_the_pool(fake: FakeCuda) -> None:
    with CallbackPool(0, driver=fake.driver, name="upstream", background=False) as pool:
        limited = rmm.mr.LimitingResourceAdaptor(mempool.rmm.resource(pool), 2 * MIB)
        where = limited.allocate(MIB)
        assert pool.client.stats()["requested"]["current"] == MIB
        with pytest.raises(MemoryError):
            limited.allocate(2 * MIB)
        limited.deallocate(where, MIB)
    with Pool(background=False) as host, pytest.raises(UsageError, match="no pool for RMM"):
        mempool.rmm.resource(host)  # type: ignore[arg-type]


def test_threads_do_not_deadlock_on_the_interpreter_lock(pool: mempool.rmm.RmmPool) -> None:
    """RMM calls without the interpreter's lock, and takes the lock for each of our callbacks."""

    def work() -> None:
        for number in range(300):
            size = 4096 * (1 + number % 7)
            resource.deallocate(resource.allocate(size), size)

    resource = current()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert pool.client.stats()["blocks"]["current"] == 0


def test_buffer_may_outlive_the_interpreter(fake_library: Path) -> None:
    """The resource is freed with the last module, and calls us then."""
    code = f"""
        import mempool.rmm, rmm.mr
        pool = mempool.rmm.install(driver={str(fake_library)!r})
        class Kept:
            def __init__(self):
                self.resource = rmm.mr.get_per_device_resource(0)
                self.address = self.resource.allocate(1 << 20)
            def __del__(self):
                self.resource.deallocate(self.address, 1 << 20)
                print("freed")
        kept = Kept()
        kept.itself = kept
        rmm.kept = kept
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("stream", [DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM])
def test_rmm_loop_is_replayed(pool: mempool.rmm.RmmPool, stream: Stream) -> None:
    for _ in range(12):
        pool.step()
        kept = [(current().allocate(size, stream), size) for size in range(4096, 40_000, 4096)]
        for where, size in reversed(kept):
            current().deallocate(where, size, stream)
        pool.plan_now()
    assert pool.report().to_dict()["hit_rate"] == 1.0
