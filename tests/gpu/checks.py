"""What must hold on a GPU, each in a process of its own with a pool installed.

python checks.py NAME
"""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch

import mempool.torch

MIB = 1 << 20


def record_stream(pool: mempool.torch.TensorPool) -> None:
    """What another stream still reads is nobody else's, however often its memory is asked for."""
    side = torch.cuda.Stream()
    for number in range(20):
        source = torch.full((64 * MIB,), float(number % 7), device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            copy = source * 2
        source.record_stream(side)
        del source
        other = torch.full((64 * MIB,), -1.0, device="cuda")
        torch.cuda.synchronize()
        assert bool((copy == 2 * (number % 7)).all()), "another stream's source was overwritten"
        del other, copy
        pool.step()


def graphs(_: mempool.torch.TensorPool) -> None:
    """A replayed graph computes what it was captured for, and touches nothing else."""
    static = torch.ones(8 * MIB, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (static * 2 + 1).sum()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = static * 2
        result = between + 1
        del between
    gc.collect()
    kept = [torch.full((8 * MIB,), float(k), device="cuda") for k in range(16)]
    for number in range(8):
        static.fill_(float(number))
        graph.replay()
        torch.cuda.synchronize()
        assert bool((result == 2 * number + 1).all()), "the graph's memory was given to others"
        assert all(bool((tensor == k).all()) for k, tensor in enumerate(kept)), "the graph wrote over others"
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    del result, graph
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before - 64 * MIB, "the graph's memory never came back"


def autograd_threads(pool: mempool.torch.TensorPool) -> None:
    """Backward passes run in threads of PyTorch's; several of ours beside them give the same sums."""
    sums: dict[int, float] = {}

    def work(number: int) -> None:
        weight = torch.full((1024, 1024), 0.5, device="cuda", requires_grad=True)
        for _ in range(50):
            (torch.ones(1024, 1024, device="cuda") @ weight).sum().backward()
        assert weight.grad is not None
        sums[number] = float(weight.grad.sum())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(sums.values()) == {50.0 * 1024 * 1024 * 1024}, sums
    assert pool.client.stats()["foreign_frees"] == 0


def out_of_memory(_: mempool.torch.TensorPool) -> None:
    """The error is PyTorch's own, and training goes on after it."""
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert float(torch.ones(MIB, device="cuda").sum()) == MIB


def statistics(_: mempool.torch.TensorPool) -> None:
    """PyTorch's own functions answer from the pool."""
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == tensor.numel()
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    assert "Allocated memory" in torch.cuda.memory_summary()


CHECKS = {
    check.__name__: check for check in (record_stream, graphs, autograd_threads, out_of_memory, statistics)
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]](mempool.torch.install(device="cuda"))
    sys.stdout.write("holds\n")
