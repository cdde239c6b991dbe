"""Streams, threads, graphs and private pools with the guest in front of PyTorch's own CUDA allocator.

Each test is a process of its own: the guest stays in front of PyTorch's allocator for good.
"""

from __future__ import annotations

import threading

from processes import alone, run_each_alone

if __name__ == "__main__":  # pytest's own process has no stand-in, without which PyTorch cannot be imported
    import torch
    from guest_programs import (
        MIB,
        install,
        iteration,
        tensor,
        train,
        values,
    )
    from standin_torch import driver


@alone
def test_planned_tensor_with_a_recorded_stream_is_not_reused_too_early() -> None:
    pool, side = install(), torch.cuda.Stream()
    host = torch.full((MIB,), 5, dtype=torch.uint8).pin_memory()
    other = torch.full((MIB,), 6, dtype=torch.uint8).pin_memory()
    for _ in range(20):
        pool.step()
        source = host.to("cuda", non_blocking=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            driver().expect(side.cuda_stream, source.data_ptr(), MIB, 5)
        source.record_stream(side)
        del source
        following = [other.to("cuda", non_blocking=True) for _ in range(3)]
        torch.cuda.synchronize()
        del following
        pool.plan_now()
    assert values(pool)["hits"] > 10
    assert driver().faults == []


@alone
def test_stream_recorded_while_a_private_pool_is_active_is_kept_by_the_plan_alone() -> None:
    """With and without the guest, PyTorch's own allocator forgets the stream and reuses the memory at once.

    It takes a stream recorded while any thread has a private pool or captures for a stream of a graph.
    """
    side = torch.cuda.Stream()
    host = torch.full((MIB,), 5, dtype=torch.uint8).pin_memory()

    def reuses(record: bool = True) -> bool:
        """Return true if the next tensor has the address of one that another stream uses."""
        source = host.to("cuda", non_blocking=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.use_mem_pool(private):
            if record:
                driver().expect(side.cuda_stream, source.data_ptr(), MIB, 5)
                source.record_stream(side)
            address = source.data_ptr()
            del source
        made = tensor(MIB)
        return bool(made.data_ptr() == address)

    private = torch.cuda.MemPool()
    native = reuses()
    torch.cuda.synchronize()
    pool = install()
    assert reuses() == native
    torch.cuda.synchronize()
    for _ in range(12):
        pool.step()
        again = reuses(record=False)
        pool.plan_now()
    hits = values(pool)["hits"]
    pool.step()
    assert again
    assert not reuses()
    assert values(pool)["hits"] == hits + 1
    assert driver().faults == []


@alone
def test_native_tensor_with_a_recorded_stream_is_not_reused_too_early() -> None:
    pool = install()
    side = torch.cuda.Stream()
    host = torch.full((MIB,), 5, dtype=torch.uint8).pin_memory()
    other = torch.full((MIB,), 6, dtype=torch.uint8).pin_memory()
    for number in range(8):
        if number == 4:
            pool.client.set_recording(False)  # from here on the pool does not know the tensors
        source = host.to("cuda", non_blocking=True)
        side.wait_stream(torch.cuda.current_stream())
        driver().expect(side.cuda_stream, source.data_ptr(), MIB, 5)
        source.record_stream(side)
        del source
        following = other.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        del following
    assert driver().faults == []


@alone
def test_tensors_copied_between_devices_are_not_reused_too_early() -> None:
    pool = install()
    host = [torch.full((MIB,), value, dtype=torch.uint8).pin_memory() for value in range(4)]
    for _ in range(16):
        pool.step()
        others = [one.to("cuda", non_blocking=True).to("cuda:1", non_blocking=True) for one in host]
        back = [one.to("cuda", non_blocking=True) for one in others]
        del others
        for value, one in enumerate(back):
            driver().expect(torch.cuda.current_stream().cuda_stream, one.data_ptr(), MIB, value)
        del back, one
        pool.plan_now()
    assert values(pool)["hits"] > 40
    torch.cuda.synchronize()
    assert driver().faults == []


@alone
def test_planned_tensor_used_by_a_stream_of_another_device_is_not_reused_too_early() -> None:
    pool, side = install(), torch.cuda.Stream("cuda:1")
    host = [torch.full((MIB,), value, dtype=torch.uint8).pin_memory() for value in (5, 6)]
    for _ in range(16):
        pool.step()
        source = host[0].to("cuda", non_blocking=True)
        side.wait_stream(torch.cuda.current_stream())
        driver().expect(side.cuda_stream, source.data_ptr(), MIB, 5, device=1)
        source.record_stream(side)
        del source
        following = [host[1].to("cuda", non_blocking=True) for _ in range(3)]
        side.synchronize()
        del following
        pool.plan_now()
    assert values(pool)["hits"] > 10
    assert driver().faults == []


@alone
def test_threads_free_planned_tensors_of_other_threads() -> None:
    pool = install()
    for _ in range(14):
        pool.step()
        made = [tensor(70_000 + 512 * number) for number in range(8)]
        thread = threading.Thread(target=made.clear)
        thread.start()
        thread.join()
        pool.plan_now()
    assert values(pool)["hits"] > 20
    assert torch.cuda.memory_allocated() == 0


@alone
def test_captured_graph_keeps_its_memory_in_native() -> None:
    pool, stream = install(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        train(pool)
        static = torch.full((MIB,), 3, dtype=torch.uint8).to("cuda")
        graph, hits = torch.cuda.CUDAGraph(), values(pool)["hits"]
        with torch.cuda.graph(graph, stream=stream):
            pool.step()
            iteration()
            result = static.clone()
        assert values(pool)["hits"] == hits
        train(pool, 4)
        assert values(pool)["hits"] > hits
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result.cpu(), static.cpu())
    assert driver().faults == []


@alone
def test_restored_state_of_a_graph_pool_is_natives() -> None:
    """Tensors of the pool made after the state lose their deleter; those of the state get one."""
    pool = install()
    train(pool)
    static = tensor(4 * MIB)
    handle, graphs = torch.cuda.graph_pool_handle(), [torch.cuda.CUDAGraph() for _ in range(2)]
    with torch.cuda.graph(graphs[0], pool=handle):
        first = static.clone()
    state, address, device = torch._C._cuda_getCheckpointState(0, handle), first.data_ptr(), first.device
    with torch.cuda.graph(graphs[1], pool=handle):
        second = static.clone()
        small = static[:8].clone()
    later = [one.untyped_storage()._cdata for one in (second, small)]
    assert all(torch._C._has_Standard_Deleter(storage) for storage in later)
    del first
    restored = torch._C._construct_storage_from_data_pointer(address, device, 4 * MIB)
    torch._C._cuda_setCheckpointPoolState(0, state, later, [restored._cdata])
    assert torch._C._has_Standard_Deleter(restored._cdata)
    hits = values(pool)["hits"]
    train(pool, 4)
    assert values(pool)["hits"] > hits
    del restored, second, small
    pool.close()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        after = static.clone()
    assert torch._C._has_Standard_Deleter(after.untyped_storage()._cdata)
    assert driver().faults == []


@alone
def test_private_pool_is_native() -> None:
    pool = install()
    train(pool)
    private, hits = torch.cuda.MemPool(), values(pool)["hits"]
    with torch.cuda.use_mem_pool(private):
        pool.step()
        iteration()
        kept = tensor(4 * MIB)
    assert values(pool)["hits"] == hits
    assert kept.data_ptr() in {segment["address"] for segment in private.snapshot()}
    train(pool, 4)
    assert values(pool)["hits"] > hits
    del kept, private
    assert driver().faults == []


@alone
def test_private_pool_from_before_the_installation_is_native() -> None:
    pools = [torch.cuda.MemPool() for _ in range(2)]  # the end of a pool is for a time without active pools
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with torch.cuda.use_mem_pool(pools[0]):
            entered.set()
            leave.wait()

    tensor(MIB)
    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    with torch.cuda.use_mem_pool(pools[1]):
        pool = install()
        leave.set()
        thread.join()
        train(pool)
    assert values(pool)["hits"] == 0
    train(pool)
    assert values(pool)["hits"] > 0
    assert driver().faults == []


@alone
def test_end_of_a_private_pool_keeps_the_arena() -> None:
    pool = install()
    train(pool)
    arena = pool.client.pool.stats()["arena_bytes"]
    for _ in range(3):
        torch.cuda.MemPool()
    assert pool.client.pool.stats()["arena_bytes"] == arena > 0


if __name__ == "__main__":
    run_each_alone(globals())
