"""Checks of PyTorch on a GPU with a pool, each in a separate process.

python checks.py NAME

The same checks run on the stand-in for CUDA, which copies bytes and runs no kernels: there only copied values
are compared.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading

import pytest
import torch

import mempool.torch

MIB = 1 << 20
COMPUTES = "MEMPOOL_STANDIN" not in os.environ
#: Number of elements of the compared tensors; fewer on the stand-in, whose copies the host makes.
NUMBERS = 8 * MIB if COMPUTES else MIB // 2


def filled(value: float) -> torch.Tensor:
    """Return a tensor on the device, copied from the host and filled with a value."""
    return torch.full((NUMBERS,), value).to("cuda")


def holds(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor.cpu() == value).all())


def record_stream(pool: mempool.torch.TensorPool) -> None:
    """Memory that another stream still reads serves no other request."""
    side = torch.cuda.Stream()
    for number in range(20):
        source = filled(number % 7)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            copy = source.clone()
        source.record_stream(side)
        del source
        other = filled(-1)
        torch.cuda.synchronize()
        assert holds(copy, number % 7), "another stream's source was overwritten"
        del other, copy
        pool.step()


def graphs(_: mempool.torch.TensorPool) -> None:
    """A replayed graph gives the captured result, and writes to no other tensor."""
    static = filled(1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        static.clone().sum()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = static.clone()
        result = between.clone()
        del between
    gc.collect()
    kept = [filled(k) for k in range(16)]
    for number in range(8):
        static.copy_(torch.full((NUMBERS,), float(number)))
        graph.replay()
        torch.cuda.synchronize()
        assert holds(result, number), "the graph's memory was given to others"
        assert all(holds(tensor, k) for k, tensor in enumerate(kept)), "the graph wrote over others"
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    del result, graph
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before - 8 * NUMBERS, "the graph's memory never came back"


def autograd_threads(pool: mempool.torch.TensorPool) -> None:
    """Backward passes in PyTorch's threads, started by several threads, give the same sums."""
    sums: dict[int, float] = {}
    # In a forked process the first backward pass makes the engine, and must not run in two threads at once.
    torch.ones(1, device="cuda", requires_grad=True).sum().backward()

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
    assert set(sums.values()) == {50.0 * 1024 * 1024 * 1024} or not COMPUTES, sums
    assert pool.client.stats()["foreign_frees"] == 0


def out_of_memory(_: mempool.torch.TensorPool) -> None:
    """A request that exceeds the device raises PyTorch's own error, and training continues."""
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert float(torch.ones(MIB, device="cuda").sum()) == MIB or not COMPUTES


def statistics(_: mempool.torch.TensorPool) -> None:
    """PyTorch's memory statistics are those of the pool."""
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == tensor.numel()
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    assert "Allocated memory" in torch.cuda.memory_summary()


def snapshots(_: mempool.torch.TensorPool) -> None:
    """A snapshot has the live tensors, and its history has their allocations."""
    torch.cuda.memory._record_memory_history()
    tensor = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    snapshot = torch.cuda.memory._snapshot()
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    live = [block["size"] for block in blocks if block["state"] == "active_allocated"]
    assert tensor.numel() in live
    entries = [entry for trace in snapshot["device_traces"] for entry in trace]
    assert any(entry["action"] == "alloc" and entry["addr"] == tensor.data_ptr() for entry in entries)


def limits(_: mempool.torch.TensorPool) -> None:
    """The memory fraction limits the pool, `mem_get_info` reports the free bytes, and peaks can be reset."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2 * 1024 * MIB / total)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(3 * 1024 * MIB, dtype=torch.uint8, device="cuda")
    tensor = torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.max_memory_allocated() >= tensor.numel()
    del tensor
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() < 1024 * MIB
    before = torch.cuda.mem_get_info()[0]
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= before + 1024 * MIB


def loader(_: mempool.torch.TensorPool) -> None:
    """A data loader with worker processes, pinned batches and asynchronous copies gives the right sum."""
    data = torch.utils.data.TensorDataset(torch.arange(4096.0))
    seen = 0.0
    for (part,) in torch.utils.data.DataLoader(data, 64, num_workers=2, pin_memory=True):
        assert part.is_pinned()
        seen += float(part.to("cuda", non_blocking=True).double().sum())
    assert seen == 4096 * 4095 / 2 or not COMPUTES


def nccl(pool: mempool.torch.TensorPool) -> None:
    """NCCL and DDP run in the pool, in a process group of one."""
    from torch.nn.parallel import DistributedDataParallel

    with tempfile.NamedTemporaryFile() as file:
        torch.distributed.init_process_group("nccl", f"file://{file.name}", rank=0, world_size=1)
        model = DistributedDataParallel(torch.nn.Linear(1024, 1024).to("cuda"), device_ids=[0])
        optimizer = torch.optim.AdamW(model.parameters())
        pool.watch(optimizer)
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.ones(1024, 1024, device="cuda")).sum().backward()
            optimizer.step()
            pool.plan_now()
        report = pool.report().to_dict()
        torch.distributed.destroy_process_group()
    assert report["hit_rate"] > 0.5, report


def planned(pool: mempool.torch.TensorPool) -> None:
    """With a plan, each allocation of a repeated step is a hit."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    pool.watch(optimizer)
    for number in range(16):
        optimizer.zero_grad()
        model(torch.ones(4096, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
        pool.plan_now()
        if number == 11:
            before = pool.report().to_dict()
    after = pool.report().to_dict()
    assert after["misses"] == before["misses"], (before, after)
    assert after["hits"] > before["hits"], (before, after)


def background(pool: mempool.torch.TensorPool) -> None:
    """The planner's thread makes a plan, although the host never waits for the device."""
    model = torch.nn.Sequential(*(torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(8))).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    pool.watch(optimizer)
    images = torch.ones(256, 64, 64, 64, device="cuda")
    began = []
    for number in range(200):
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
        if not began and pool.report().to_dict()["hits"]:
            began.append(number)
    torch.cuda.synchronize()
    assert began, f"no hit in 200 steps; {pool.report().to_dict()}"
    assert began[0] < 50, f"the first hit was in step {began[0]}"


CHECKS = {
    check.__name__: check
    for check in (
        record_stream, graphs, autograd_threads, out_of_memory, statistics, snapshots, limits, loader, nccl,
        planned, background,
    )
}  # fmt: skip

if __name__ == "__main__":
    CHECKS[sys.argv[1]](mempool.torch.install(device="cuda", backend="pluggable"))
    sys.stdout.write("holds\n")
