"""Streams, graphs and collectives on the stand-in: memory is never used too early."""

from __future__ import annotations

import logging
import os
import threading
import warnings

import pytest
from processes import alone, run_each_alone

if __name__ == "__main__":  # pytest's own process has no stand-in, without which PyTorch cannot be imported
    import standin_torch
    import torch
    import torch._dynamo  # for all processes, as a limit imports it
    import torch.distributed.fsdp

    import mempool.torch
    from mempool._core import CudaCopies
    from mempool.cuda import DRIVER
    from mempool.rehearsal import ranks

MIB = 1 << 20


@pytest.mark.parametrize("backend", ["guest", "pluggable"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@alone
def test_memory_that_a_collective_uses_is_not_reused(kind: str, backend: str) -> None:
    warnings.simplefilter("ignore")  # of PyTorch's own modules
    os.environ |= ranks.ENVIRONMENT | {"WORLD_SIZE": "4"}
    ranks.accept_shapes()
    ranks.pretend(4)
    torch.distributed.init_process_group("nccl")
    pool = mempool.torch.install(device="cuda", backend=backend, background=False)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
    else:
        for layer in (*model, model):
            torch.distributed.fsdp.fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    pool.watch(optimizer)
    for _ in range(10):
        model(torch.randn(32, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        pool.plan_now()
    assert pool.report().to_dict()["hits"] > 50
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group()
    standin_torch.check_faults()


@pytest.mark.parametrize("first", ["pool", "group"])
@alone
def test_collectives_register_the_arena_that_planned_tensors_lie_in(first: str) -> None:
    os.environ |= ranks.ENVIRONMENT | {"WORLD_SIZE": "4"}
    os.environ["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"] = "1"
    ranks.accept_shapes()
    ranks.pretend(4)

    def tensor() -> torch.Tensor:
        made = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        torch.distributed.all_reduce(made)
        return made

    if first == "group":
        torch.distributed.init_process_group("nccl")
        assert standin_torch.registrations(tensor()) == 1
    pool = mempool.torch.install(device="cuda", backend="guest", background=False)
    if first == "pool":
        torch.distributed.init_process_group("nccl")
    for _ in range(12):
        pool.step()
        kept = [tensor() for _ in range(3)]
        pool.plan_now()
    assert all(pool.client.planned_offset_of(one.data_ptr()) is not None for one in kept)
    assert [standin_torch.registrations(one) for one in kept] == [1] * 3
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group()
    standin_torch.check_faults()


@alone
def test_thread_without_a_context_orders_the_default_stream() -> None:
    data, stream = torch.empty(MIB, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        data.zero_()
    events = [CudaCopies(DRIVER).record(stream.cuda_stream)]
    queue = torch.cuda.current_stream().cuda_stream

    def order() -> None:
        assert not events[0].query()
        events.pop().order_before(queue)

    thread = threading.Thread(target=order)
    thread.start()
    thread.join()
    assert events == []
    data.zero_()
    torch.cuda.synchronize()
    standin_torch.check_faults()


@alone
def test_capture_in_parts_keeps_the_memory_of_each_part() -> None:
    """As where a graph has conditional nodes, each of whose bodies is a part."""
    mempool.torch.install(device="cuda", backend="pluggable", background=False)
    graph, stream, inside = torch.cuda.CUDAGraph(), torch.cuda.Stream(), set()
    name = torch.cuda.graph_pool_handle()
    with torch.cuda.stream(stream):
        graph.capture_begin(name, capture_error_mode="thread_local")
        for _ in range(3):
            inside.add(torch.zeros(MIB, device="cuda").data_ptr())
            torch._C._cuda_endAllocateToPool(0, name)
            torch.cuda.empty_cache()
            torch._C._cuda_beginAllocateCurrentStreamToPool(0, name)
        inside.add(torch.empty(MIB, device="cuda").data_ptr())
        graph.capture_end()
        others = [torch.empty(MIB, device="cuda") for _ in range(4)]
    assert inside.isdisjoint(one.data_ptr() for one in others)
    del graph, others
    for _ in range(3):
        torch._C._cuda_releasePool(0, name)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    assert standin_torch.driver().faults == []


@alone
def test_memory_of_a_failed_capture_is_kept_until_its_release_and_no_other() -> None:
    mempool.torch.install(device="cuda", backend="pluggable", background=False)
    graph, stream, name = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    with torch.cuda.stream(stream):
        graph.capture_begin(name, capture_error_mode="global")
        torch.empty(MIB, device="cuda")
        with pytest.raises(RuntimeError):
            torch.cuda.synchronize()  # which a capture does not bear
        with pytest.raises(RuntimeError):
            graph.capture_end()
        del graph
        torch.empty(64 * MIB, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert 0 < torch.cuda.memory_reserved() < 64 * MIB
    torch._C._cuda_releasePool(0, name)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    assert standin_torch.driver().faults == []


@alone
def test_moves_within_a_limit_are_no_unseen_writes() -> None:
    """Unseen writes make the copies on the host stale."""
    from mempool.torch.eager import interposer

    logging.getLogger("mempool").setLevel(logging.ERROR)  # so small a limit is exceeded
    pool = mempool.torch.install(device="cuda", limit="6MiB", host_limit="64MiB", background=False)
    kept = [torch.ones(MIB // 4, device="cuda") for _ in range(8)]
    counts = []
    for _ in range(4):
        torch._foreach_add_(kept[:2], 1.0)
        for one in kept:
            one.add_(1)
        pool.step()
        counts.append(interposer.unseen_writes().value)
    assert counts[-1] == counts[-2]  # measuring the link copies too
    assert pool.report().to_dict()["swapping"]["iteration_out_bytes"] > MIB


@alone
@pytest.mark.parametrize("other", ["0", "1"])
def test_native_moves_keep_tensors_on_their_devices(other: str) -> None:
    """Also where the program makes another device the current one."""
    logging.getLogger("mempool").setLevel(logging.ERROR)  # measuring the link exceeds the limit
    pool = mempool.torch.install(
        device="cuda", limit="26MiB", host_limit="64MiB", memory="growing", background=False
    )
    assert pool.offloading is not None
    data = torch.ones(2 * MIB, dtype=torch.uint8)
    kept = [data.to(f"cuda:{number % 3 // 2}") for number in range(12)]

    for _ in range(30):
        for number, tensor in enumerate(kept):
            with torch.cuda.device(number % 2 * int(other)):
                tensor.clone().clone()
                tensor.mul_(1)
        pool.step()
        pool.plan_now()
    assert pool.offloading.mode.transfers.makes_native_moves
    assert [one.untyped_storage().device for one in kept] == [one.device for one in kept]


@alone
def test_native_copies_that_ctrl_c_leaves_unused_return_their_host_memory() -> None:
    pool = mempool.torch.install(device="cuda", limit="26MiB", host_limit="64MiB", background=False)
    assert pool.offloading is not None
    torch.ones(MIB, device="cuda")
    engine = pool.offloading.mode.engine
    for _ in range(2):
        copies = engine.native_copies(48 * MIB)  # of which the host has room for one
        assert copies is not None
        del copies


@alone
def test_reloaded_tensor_still_belongs_to_its_own_stream() -> None:
    """The last use before the free is on the tensor's own stream; another stream reloaded the tensor."""
    logging.getLogger("mempool").setLevel(logging.ERROR)  # so small a limit is exceeded
    pool = mempool.torch.install(device="cuda", limit="6MiB", host_limit="64MiB", background=False)
    host = [torch.full((MIB,), value, dtype=torch.uint8).pin_memory() for value in (1, 2)]
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = host[0].to("cuda", non_blocking=True)
    others = [host[1].to("cuda", non_blocking=True) for _ in range(10)]
    assert pool.report().to_dict()["swapping"]["out_bytes"] >= MIB
    main.wait_stream(side)
    tensor.clone()
    side.wait_stream(main)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        copy = torch.empty_like(tensor)
        copy.copy_(tensor, non_blocking=True)
        standin_torch.driver().expect(side.cuda_stream, copy.data_ptr(), MIB, 1)
    del tensor
    others = [host[1].to("cuda", non_blocking=True) for _ in range(3)]
    main.synchronize()
    side.synchronize()
    del others
    standin_torch.check_faults()


@alone
@pytest.mark.parametrize("place", ["stream", "capture", "backward"])
def test_entries_used_elsewhere_are_seen_by_the_mode(place: str) -> None:
    """Another stream has to be known before it reads, and a graph keeps the addresses of its tensors."""
    logging.getLogger("mempool").setLevel(logging.ERROR)  # so small a limit is exceeded
    pool = mempool.torch.install(device="cuda", limit="6MiB", host_limit="64MiB", background=False)
    assert pool.offloading is not None
    mode = pool.offloading.mode
    target, source = torch.zeros(MIB, device="cuda"), torch.ones(MIB, device="cuda")

    def add_entries(count: int) -> int:
        before = mode.operations.clock
        for at in range(count):
            target[at].add_(source[at])
        return mode.operations.clock - before

    assert add_entries(200) < 100
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    if place == "stream":
        with torch.cuda.stream(side):
            assert add_entries(1) == 1
    elif place == "capture":
        with torch.cuda.graph(graph):
            assert add_entries(1) == 1
        assert not mode.storages.find(target.untyped_storage()).movable
    else:
        seen = []
        weight = torch.ones(1, device="cuda", requires_grad=True)
        weight.register_hook(lambda _: seen.append(add_entries(1)))
        weight.sum().backward()
        assert seen == [1]


if __name__ == "__main__":
    run_each_alone(globals())
