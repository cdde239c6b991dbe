"""PyTorch's tensors on memory that others use too: see also tests/mempool/test_sharing.py."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from processes import alone, run_each_alone

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from cuda_torch import CudaTorch

import mempool.numpy
import mempool.torch
from mempool import Pool, UsageError
from mempool.cuda_callbacks import CallbackPool

MIB = 1 << 20


def install(driver: str, **options: object) -> mempool.torch.TensorPool:
    return mempool.torch.install(device="cuda", driver=driver, **{"background": False, **options})


def other_on(driver: str, **options: object) -> CallbackPool:
    return CallbackPool(0, driver=driver, name="other", background=False, **options)


# --- on CUDA


@alone
def test_memory_moves_between_pytorch_and_another_client_and_back(driver: str) -> None:
    on = CudaTorch(driver)
    other = other_on(driver)
    pool = install(driver, share=other)
    where = on.alloc(MIB)
    reserved = other.core.stats()["reserved"]["current"]
    on.free(where)
    assert other.take(MIB) == where
    assert pool.report().to_dict()["requested_bytes"] == 0
    assert other.report().to_dict()["requested_bytes"] == MIB
    other.give(where, 0)
    assert on.alloc(MIB) == where
    assert other.core.stats()["reserved"]["current"] == reserved
    assert on.fake.faults == []


@alone
def test_each_client_replays_its_plan(driver: str) -> None:
    on = CudaTorch(driver)
    pool = install(driver)
    on.free(on.alloc(MIB))  # now it is known which device it is
    other = CallbackPool(None, driver=driver, share=pool, name="other", background=False)
    for _ in range(12):
        pool.step()
        on.iteration()
        pool.plan_now()
        other.step()
        kept = [other.take(size) for size in range(4096, 40_000, 4096)]
        for address in kept:
            other.give(address, 0)
        other.plan_now()
    assert pool.report().to_dict()["hit_rate"] == other.report().to_dict()["hit_rate"] == 1.0
    assert on.fake.faults == []


@alone
def test_shared_device_is_pytorchs_device(driver: str) -> None:
    on = CudaTorch(driver)
    pool = install(driver)
    other = CallbackPool(None, driver=driver, share=pool, background=False)
    other.bind(1)
    assert pool.index == 1
    address = on.alloc(MIB, device=1)
    assert other.core.owns(address)


@alone
def test_shared_streams_need_consent(driver: str) -> None:
    CudaTorch(driver)
    with pytest.raises(UsageError, match="make that pool with wait_bytes='never'"):
        install(driver, share=other_on(driver, wait_bytes=0))
    with pytest.raises(UsageError, match="is no pool of a CUDA device"):
        install(driver, share=Pool(background=False))
    install(driver, share=other_on(driver, wait_bytes=0), wait_bytes=0)


@alone
def test_next_pool_on_the_same_memory_counts_leftovers(driver: str) -> None:
    on = CudaTorch(driver)
    other = other_on(driver)
    former = install(driver, share=other)
    kept = on.alloc(MIB)
    former.close()
    pool = install(driver, share=other)
    assert pool.report().to_dict()["requested_bytes"] == MIB
    on.free(kept)
    assert pool.report().to_dict()["requested_bytes"] == 0
    assert on.fake.faults == []


# --- on the host


@alone
def test_arrays_and_tensors_share_memory() -> None:
    with (
        mempool.numpy.install(background=False) as arrays,
        mempool.torch.install(device="cpu", share=arrays, background=False) as tensors,
    ):
        tensor = torch.ones(1 << 20)
        where = tensor.data_ptr()
        reserved = arrays.core.stats()["reserved"]["current"]
        arrays.client.set_retained_limit(64 * MIB)
        del tensor
        gc.collect()
        array = np.empty(1 << 20, np.float32)
        assert array.ctypes.data == where
        assert arrays.core.stats()["reserved"]["current"] == reserved
        assert tensors.report().to_dict()["shared_with"] == ["numpy"]
        del array


@alone
def test_mixed_loop_is_identical_without_sharing() -> None:
    def work(step: int) -> float:
        batch = np.arange(1 << 16, dtype=np.float32) * step
        weights = torch.linspace(0, 1, 1 << 16, requires_grad=True)
        loss = (torch.from_numpy(batch) * weights).square().mean()
        loss.backward()
        assert weights.grad is not None
        return float(loss.detach()) + float(np.sum(np.sqrt(weights.grad.numpy())))

    plain = [work(step) for step in range(20)]
    with (
        mempool.numpy.install(background=False) as arrays,
        mempool.torch.install(device="cpu", share=arrays, background=False) as tensors,
    ):
        pooled = []
        for step in range(20):
            arrays.step()
            tensors.step()
            pooled.append(work(step))
            arrays.plan_now()
            tensors.plan_now()
        assert tensors.report().to_dict()["hits"] > 0
    assert pooled == plain


if __name__ == "__main__":
    run_each_alone(globals())
