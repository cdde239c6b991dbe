"""PyTorch's tensors on memory that arrays use too; on CUDA: tests/rehearsal/test_pool_install.py."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from processes import alone, run_each_alone

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import mempool.numpy
import mempool.torch

MIB = 1 << 20


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
