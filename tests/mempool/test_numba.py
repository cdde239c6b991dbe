"""Numba's memory manager on a fake driver: allocation, frees, and refusals."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import FakeCuda

pytest.importorskip("numba.cuda.cudadrv.driver", reason="Numba is not installed")

from numba import cuda
from numba.cuda.cudadrv import driver as numba_driver

import mempool.numba
from mempool import UsageError

pytestmark = pytest.mark.skipif(
    not hasattr(cuda, "HostOnlyCUDAMemoryManager"), reason="this Numba has no memory plug-ins"
)
MIB = 1 << 20


class Context(SimpleNamespace):
    """The part of Numba's context that a manager uses."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(device=SimpleNamespace(id=index))


@pytest.fixture
def pool(fake: FakeCuda) -> Iterator[mempool.numba.NumbaPool]:
    with mempool.numba.install(driver=fake.driver, background=False) as installed:
        yield installed
    gc.collect()


@pytest.fixture
def manager(pool: mempool.numba.NumbaPool) -> Any:
    return numba_driver._memory_manager(context=Context())


def address(memory: Any) -> int:
    return int(memory.device_pointer)


def test_install_sets_numbas_manager_and_close_restores_the_former(fake: FakeCuda) -> None:
    before = numba_driver._memory_manager
    with mempool.numba.install(driver=fake.driver, background=False) as pool:
        assert numba_driver._memory_manager is mempool.numba.Manager
        assert mempool.numba.installed() is pool
        with pytest.raises(UsageError, match=r"Numba has a pool already: mempool\.numba\.uninstall\(\) it"):
            mempool.numba.install(driver=fake.driver)
        assert mempool.numba.installed() is pool
    assert numba_driver._memory_manager in (before, numba_driver.NumbaCUDAMemoryManager)
    assert fake.calls("cuMemAlloc_v2") == 0


def test_environment_variable_alone_selects_the_manager() -> None:
    code = (
        "from numba.cuda.cudadrv import driver; driver._ensure_memory_manager(); "
        "import mempool.numba; assert driver._memory_manager is mempool.numba.Manager"
    )
    environment = os.environ | {"NUMBA_CUDA_MEMORY_MANAGER": "mempool.numba", "PATH": ""}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True)


def test_manager_without_a_pool_makes_a_pool(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mempool.numba.NumbaPool.__init__, "__kwdefaults__", {"synchronize": True})
    monkeypatch.setattr(
        mempool.cuda_callbacks.CallbackPool.__init__, "__kwdefaults__", {"driver": fake.driver, "share": None}
    )
    manager = mempool.numba.Manager(context=Context(1))
    manager.memalloc(MIB)
    made = mempool.numba.installed()
    assert made is not None
    assert made.index == 1
    made.close()


def test_install_after_numba_has_made_a_context_is_refused(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = {0: SimpleNamespace(primary_context=object())}
    monkeypatch.setattr(numba_driver.driver, "devices", devices)
    with pytest.raises(UsageError, match="has used CUDA already"):
        mempool.numba.install(driver=fake.driver, background=False)
    assert mempool.numba.installed() is None


def test_dropped_memory_serves_the_next_request(pool: mempool.numba.NumbaPool, manager: Any) -> None:
    first = manager.memalloc(MIB)
    assert (first.size, pool.client.stats()["requested"]["current"]) == (MIB, MIB)
    where, reserved = address(first), pool.core.stats()["reserved"]["current"]
    del first
    gc.collect()
    assert pool.client.stats()["requested"]["current"] == 0
    again = manager.memalloc(MIB)
    assert address(again) == where
    assert pool.core.stats()["reserved"]["current"] == reserved


def test_memory_in_use_by_a_stream_does_not_serve_the_next_request(
    fake: FakeCuda, pool: mempool.numba.NumbaPool, manager: Any
) -> None:
    """Numba does not report a kernel's read on another stream; the next owner may write at once."""
    slow, fast = fake.stream(), fake.stream()
    memory = manager.memalloc(MIB)
    where = address(memory)
    fake.write(slow, where, 4096, 1)
    fake.finish(slow)
    fake.expect(slow, where, 4096, 1)
    memory.free()
    again = manager.memalloc(MIB)
    assert address(again) == where
    fake.write(fast, where, 4096, 2)
    fake.finish(fast)
    fake.finish(slow)
    again.free()


def test_allocation_without_synchronizing_does_not_wait_for_the_device(fake: FakeCuda) -> None:
    with mempool.numba.install(driver=fake.driver, synchronize=False, background=False):
        manager = mempool.numba.Manager(context=Context())
        manager.memalloc(MIB).free()
        before = fake.calls("cuCtxSynchronize")
        manager.memalloc(MIB).free()
        assert fake.calls("cuCtxSynchronize") == before


def test_frees_inside_defer_cleanup_wait_until_its_end(
    fake: FakeCuda, pool: mempool.numba.NumbaPool, manager: Any
) -> None:
    kept = [manager.memalloc(MIB) for _ in range(3)]
    before = fake.calls("cuCtxSynchronize")
    with manager.defer_cleanup(), manager.defer_cleanup():
        for memory in kept:
            memory.free()
        manager.memalloc(MIB).free()
        assert fake.calls("cuCtxSynchronize") == before
        assert pool.client.stats()["blocks"]["current"] == 4
    assert pool.client.stats()["blocks"]["current"] == 0
    assert fake.calls("cuCtxSynchronize") == before + 1


def test_memory_whose_wait_fails_is_freed_later(
    fake: FakeCuda, pool: mempool.numba.NumbaPool, manager: Any
) -> None:
    memory = manager.memalloc(MIB)
    fake.fail("cuCtxSynchronize", times=1)
    memory.free()
    assert pool.client.stats()["blocks"]["current"] == 1
    manager.reset()
    assert pool.client.stats()["blocks"]["current"] == 0


def test_out_of_memory_is_numbas_own_error_with_the_numbers(
    fake: FakeCuda, pool: mempool.numba.NumbaPool, manager: Any
) -> None:
    fake.set_capacity(64 * MIB)
    with pytest.raises(numba_driver.CudaAPIError, match="134,217,728 bytes asked for") as told:
        manager.memalloc(128 * MIB)
    assert told.value.code == 2
    manager.memalloc(MIB).free()


def test_driver_errors_other_than_out_of_memory_are_runtime_errors(
    fake: FakeCuda, pool: mempool.numba.NumbaPool, manager: Any
) -> None:
    fake.fail("cuMemAlloc_v2", 719)
    with pytest.raises(RuntimeError, match=r"cuMemAlloc_v2 .*CUDA_ERROR_LAUNCH_FAILED"):
        manager.memalloc(32 * MIB)


def test_memory_info_counts_free_memory_of_the_pool_as_free(
    fake: FakeCuda, pool: mempool.numba.NumbaPool, manager: Any
) -> None:
    fake.set_capacity(64 * MIB)
    manager.memalloc(8 * MIB).free()
    free, total = manager.get_memory_info()
    assert (free, total) == (64 * MIB, 64 * MIB)  # what the pool keeps is free too


def test_handles_for_other_processes_are_refused(manager: Any) -> None:
    with pytest.raises(NotImplementedError, match="another process"):
        manager.get_ipc_handle(manager.memalloc(MIB))


def test_pool_serves_a_single_device(pool: mempool.numba.NumbaPool, manager: Any) -> None:
    manager.memalloc(MIB)
    with pytest.raises(UsageError, match="is of CUDA device 0, not 1"):
        mempool.numba.Manager(context=Context(1)).memalloc(MIB)


def test_closed_pool_goes_on_serving(pool: mempool.numba.NumbaPool, manager: Any) -> None:
    kept = manager.memalloc(MIB)
    pool.close()
    manager.memalloc(MIB).free()
    kept.free()
    assert pool.client.stats()["blocks"]["current"] == 0


def test_loop_in_numba_is_replayed(pool: mempool.numba.NumbaPool, manager: Any) -> None:
    for _ in range(12):
        pool.step()
        kept = [manager.memalloc(4096 * (1 + layer)) for layer in range(8)]
        while kept:
            manager.memalloc(30_000).free()
            kept.pop().free()
        pool.plan_now()
    assert pool.report().to_dict()["hit_rate"] == 1.0
    pool.close()
    assert pool.client.patterns() == []
