"""CuPy's arrays on another pool's memory, and memory of every kind, on a driver without a GPU."""

from __future__ import annotations

import pytest
from fake_cuda import FakeCuda

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cupy_platform import Current, FakePlatform, install  # noqa: E402

import mempool.cupy  # noqa: E402
from mempool import Pool, UsageError  # noqa: E402
from mempool.cupy.platform import Cuda  # noqa: E402

MIB = 1 << 20


def test_memory_freed_by_a_pool_serves_cupy_and_back(fake: FakeCuda, current: Current) -> None:
    platform = FakePlatform(current, fake.device)
    with (
        Pool(fake.device(), wait_bytes="never", background=False) as other,
        install(platform, share=other) as pool,
    ):
        address = other.allocate(3 * MIB)
        other.free(address)
        held = fake.live_bytes()
        array = cupy.ndarray((3 * MIB,), "u1")
        assert array.data.ptr == address
        assert (fake.live_bytes(), platform.devices) == (held, {})
        assert (pool.used_bytes(), pool.free_bytes()) == (3 * MIB, held - 3 * MIB)
        del array
        address = other.allocate(3 * MIB)
        assert (pool.used_bytes(), pool.free_bytes()) == (0, held - 3 * MIB)  # the other's is not free
        other.free(address)
        assert other.allocate(3 * MIB) == address
        other.free(address)
        assert pool.pool(0).core is other.core
        with current.on(device=1):  # the other pool is of the first device
            array = cupy.ndarray((3 * MIB,), "u1")
            assert list(platform.devices) == [1]
            del array
        assert pool.release()
        assert fake.live_bytes() == 0


def test_pool_to_share_is_resolved_at_the_first_array(fake: FakeCuda, current: Current) -> None:
    """Under `mempool run`, for example, CuPy may be imported before PyTorch."""
    found: list[Pool] = []
    with install(FakePlatform(current, fake.device), share=lambda: found[0] if found else None) as pool:
        with Pool(fake.device(), wait_bytes="never", background=False) as other:
            found.append(other)
            assert cupy.ndarray((MIB,), "u1").data.ptr != 0
            assert pool.pool(0).core is other.core
        with current.on(device=1):  # it is closed by now
            assert cupy.ndarray((MIB,), "u1").data.ptr != 0
            assert pool.pool(1).core is not other.core


def test_sharing_a_host_pool_or_no_pool_is_refused_at_once(fake: FakeCuda, current: Current) -> None:
    with Pool(background=False) as host:
        for share, says in ((host, "no pool of a CUDA device"), ("torch", r"share is .*, not a pool")):
            with pytest.raises(UsageError, match=says):
                install(FakePlatform(current, fake.device), share=share)
    assert not mempool.cupy.is_installed()


def test_closed_pool_serves_later_devices_from_the_shared_memory(fake: FakeCuda, current: Current) -> None:
    with Pool(fake.device(), wait_bytes=0, background=False) as other:
        pool = install(FakePlatform(current, fake.device), share=other, wait_bytes=0)
        pool.close()
        pointer = pool.malloc(4096)
        assert other.core.owns(pointer.ptr)
        del pointer


@pytest.mark.parametrize("memory", ["plain", "growing", "managed"])
def test_memory_has_the_requested_kind(fake: FakeCuda, current: Current, memory: str) -> None:
    cuda = Cuda(fake.driver, memory=memory)
    with install(FakePlatform(current, cuda.device), memory=memory) as pool:
        for _ in range(8):
            pool.step()
            arrays = [cupy.ndarray((n * MIB,), "u1") for n in (3, 1, 2)]
            del arrays
            pool.plan_now()
        assert pool.planned is not None
        report = pool.report().to_dict()
        assert report["misses"] == 0
        assert {
            "state",
            "hits",
            "planned_arena_bytes",
            "reserved_peak_bytes",
        } <= report.keys()  # for the demo
        assert cupy.get_default_memory_pool().total_bytes() == report["reserved_bytes"]
        assert getattr(pool.pool(0).device, "kind", None) == memory
        assert pool.release()


def test_every_adapter_can_share_cupys_pool(fake: FakeCuda, current: Current) -> None:
    """CuPy can also share a pool without a device yet, but no closed pool."""
    from mempool.cuda_callbacks import CallbackPool

    with (
        install(FakePlatform(current, fake.device)) as pool,
        CallbackPool(0, share=pool, name="other", background=False) as other,
    ):
        address = other.take(3 * MIB)
        other.give(address, 0)
        assert cupy.ndarray((3 * MIB,), "u1").data.ptr == address
    with (
        CallbackPool(None, driver=fake.driver, name="first", background=False) as first,
        install(FakePlatform(current, fake.device), share=first) as pool,
    ):
        assert cupy.ndarray((MIB,), "u1").data.ptr != 0
        assert (first.index, pool.pool(0).core) == (0, first.core)
    with pytest.raises(UsageError, match="closed"):
        install(FakePlatform(current, fake.device), share=first)


def test_array_on_another_device_does_not_bind_the_found_pool(fake: FakeCuda, current: Current) -> None:
    from mempool.cuda_callbacks import CallbackPool

    with (
        CallbackPool(None, driver=fake.driver, name="tensors", background=False) as found,
        install(FakePlatform(current, fake.device), share=lambda: found),
        current.on(device=1),
    ):
        assert cupy.ndarray((MIB,), "u1").data.ptr != 0
        assert found.index is None


def test_gpu_without_the_memory_kind_is_reported_before_the_first_array(fake: FakeCuda) -> None:
    fake.set_attribute(102, 0)
    with pytest.raises(UsageError, match="CUDA device 0 has no growing memory"):
        Cuda(fake.driver, memory="growing").device(0)
