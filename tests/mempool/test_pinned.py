"""Pooled page-locked memory, on a driver without a GPU."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from fake_cuda import FakeCuda, eventually, on_another_thread

from mempool import OutOfMemoryError, pinned
from mempool.pinned import PinnedPool

MIB = 1 << 20


@pytest.fixture
def pool(fake: FakeCuda) -> Iterator[PinnedPool]:
    with PinnedPool(driver=fake.driver, background=False) as made:
        yield made
        made.release()


def address(array: np.ndarray) -> int:
    where: int = array.__array_interface__["data"][0]
    return where


def test_arrays_are_the_hosts_and_aligned(fake: FakeCuda, pool: PinnedPool) -> None:
    arrays = [pool.empty((n, 7), "f4") for n in (1, 100, 60_000, 0)]
    for k, array in enumerate(arrays):
        array[:] = k
    assert [float(array.sum()) for array in arrays] == [0, 700, 840_000, 0]
    assert all(address(array) % 512 == 0 for array in arrays[:3])
    assert pool.empty(3).dtype == np.float64
    assert fake.calls("cuMemHostAlloc") > 0
    assert fake.calls("cuMemAlloc_v2") == 0


def test_pinned_memory_is_reused_after_its_streams_have_finished(fake: FakeCuda, pool: PinnedPool) -> None:
    """A copy from the memory is queued: the next owner must not write before."""
    stream = fake.stream()
    array = pool.empty(MIB, "u1")
    first = address(array)
    array[:] = 7
    fake.expect(stream, first, MIB, 7)
    pool.used_by(array[3:], stream)  # of a view
    del array
    other = pool.empty(MIB, "u1")
    assert address(other) != first
    other[:] = 1
    fake.finish(stream)
    assert address(pool.empty(MIB, "u1")) == first
    unused = address(pool.empty(MIB, "u1"))
    assert address(pool.empty(MIB, "u1")) == unused


def test_stream_object_is_accepted_and_kept_until_the_array_is_freed(
    fake: FakeCuda, pool: PinnedPool
) -> None:
    class Stream:
        ptr = fake.stream()

    stream = Stream()
    seen = weakref.ref(stream)
    array = pool.empty(np.int64(1000), "u1")
    pool.used_by(array, stream)
    del stream
    assert seen() is not None
    del array
    assert seen() is None
    with pytest.raises(TypeError):
        pool.used_by(pool.empty(10), "stream")


def test_default_stream_belongs_to_the_using_thread_wherever_the_array_is_freed(
    fake: FakeCuda, pool: PinnedPool
) -> None:
    """Named in one thread, freed in another: the pool waits for the work queued by the first thread."""
    array = pool.empty(MIB, "u1")
    first = address(array)
    array[:] = 7

    kept = [array]
    del array

    def use() -> None:
        fake.expect(2, first, MIB, 7)
        pool.used_by(kept[0], 2)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    waits = fake.calls("cuCtxSynchronize")
    kept.clear()
    other = pool.empty(MIB, "u1")
    assert address(other) != first or fake.calls("cuCtxSynchronize") > waits
    other[:] = 1


def test_pinned_memory_used_by_ended_threads_is_reused(fake: FakeCuda, pool: PinnedPool) -> None:
    """Default streams of ended threads cannot be queried."""
    kept: list[np.ndarray] = []

    def use() -> None:
        kept.append(pool.empty(MIB, "u1"))
        fake.expect(2, address(kept[-1]), 8, 0)
        pool.used_by(kept[-1], 2)

    for _ in range(20):
        on_another_thread(use)
    kept.clear()
    waits = fake.calls("cuCtxSynchronize")
    assert eventually(lambda: pool.trim() or not pool.client.stats()["deferred_bytes"])
    assert fake.calls("cuCtxSynchronize") <= waits + 20
    assert pool.release()
    assert fake.live_allocations == 0


@pytest.mark.parametrize("default", [True, False])
def test_free_waits_for_streams_of_another_gpu(fake: FakeCuda, pool: PinnedPool, default: bool) -> None:
    """Default streams belong to the GPU that is current when they are named."""
    there = fake.primary(1)
    stream = 0 if default else fake.stream(there)
    array = pool.empty(MIB, "u1")
    fake.set_current(there)
    fake._call("write", stream, there, address(array), MIB, 5)
    pool.used_by(array, stream)
    assert fake._call("pending", stream, there) == 1
    fake.set_current(fake.primary(0))
    waits = fake.calls("cuStreamSynchronize")
    del array
    assert fake._call("pending", stream, there) == 0
    assert fake.calls("cuStreamSynchronize") == waits + 1
    assert pool.device.errors == 0  # type: ignore[attr-defined]
    assert fake.current == fake.primary(0)
    fake.set_current(0)


def test_arrays_outlive_the_pool(fake: FakeCuda) -> None:
    with PinnedPool(driver=fake.driver, background=False) as pool:
        array = pool.empty(MIB)
        view = array[5:].reshape(-1)
    del pool, array
    view[:] = 3
    assert float(view.sum()) == 3 * (MIB - 5)
    assert fake.live_allocations > 0


def test_out_of_memory_is_a_clear_error_and_the_pool_goes_on(fake: FakeCuda, pool: PinnedPool) -> None:
    fake.fail("cuMemHostAlloc", 2)
    with pytest.raises(OutOfMemoryError, match="64"):
        pool.empty(64 * MIB, "u1")
    fake.fail("cuMemHostAlloc", times=0)
    assert pool.empty(64 * MIB, "u1").size == 64 * MIB


def test_array_of_another_allocator_is_refused(pool: PinnedPool) -> None:
    for array in (np.zeros(3), np.frombuffer(b"1234", "u1")):
        with pytest.raises(ValueError, match="not of a pool of pinned memory"):
            pool.used_by(array, 0)


def test_array_alive_at_the_end_of_python_does_no_harm(fake: FakeCuda) -> None:
    program = """if True:
        import sys
        from mempool.pinned import PinnedPool
        pool = PinnedPool(driver=sys.argv[1])
        kept = pool.empty(1 << 20)
    """
    done = subprocess.run(
        [sys.executable, "-c", program, fake.driver], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_cupy_takes_its_pinned_memory_from_the_pool(
    fake: FakeCuda, pool: PinnedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A free counts as a use by the stream current then."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    current = fake.stream()
    monkeypatch.setattr(pinned, "_current_stream", lambda: current)
    monkeypatch.setattr(pinned, "_current_device", lambda: 0)
    cupy.cuda.set_pinned_memory_allocator(pool.malloc)
    try:
        memory = cupy.cuda.alloc_pinned_memory(MIB)
        first = memory.ptr
        assert memory.size() == MIB
        later = memory + 100
        fake.expect(current, first, MIB, 0)
        del memory
        assert cupy.cuda.alloc_pinned_memory(MIB).ptr != first
        del later
        assert cupy.cuda.alloc_pinned_memory(MIB).ptr != first
        fake.finish(current)
        assert cupy.cuda.alloc_pinned_memory(MIB).ptr == first
        fake.finish(current)
    finally:
        cupy.cuda.set_pinned_memory_allocator()
