"""The guest in front of PyTorch's own CUDA allocator, on PyTorch's CUDA build and the stand-in.

Each test is a process of its own: the guest stays in front of PyTorch's allocator for good.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from processes import alone, run_each_alone

from mempool.rehearsal import standin

GPU = Path(__file__).parents[1] / "gpu"
sys.path.insert(0, str(GPU))

if __name__ == "__main__":  # pytest's own process has no stand-in, without which PyTorch cannot be imported
    import checks
    import torch
    from guest_programs import install, iteration, planned, silent, tensor, train, values
    from standin_torch import driver

    import mempool.torch
    from mempool import UsageError, _core
    from mempool.torch import compiled_library

MIB = 1 << 20


def native_allocations() -> int:
    """Return the number of blocks allocated by PyTorch's own allocator."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def allow(size: int) -> None:
    """Limit the bytes that PyTorch's allocator holds."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(size / total)


def counts(pool: mempool.torch.TensorPool) -> dict[str, int]:
    """Return the requests above the small-size threshold, and how many of them hit or missed."""
    found, outcomes = values(pool), pool.client.stats()["outcomes"]
    return {"requests": sum(outcomes.values()), "hits": found["hits"], "misses": found["misses"]}


def logged() -> list[str]:
    """Return a list that gets each later line of the log."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("mempool")
    log.addHandler(handler)
    log.propagate = False
    return said


# --- recording, plans and replay


@alone
def test_marked_training_hits_after_the_plan_and_misses_are_native() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    pool = install(small_bytes=0)  # CUDA is in use
    pool.watch(optimizer)
    train_model(pool, model, optimizer, 12)
    before, native = counts(pool), native_allocations()
    train_model(pool, model, optimizer, 20)
    after = counts(pool)
    hits, misses = after["hits"] - before["hits"], after["misses"] - before["misses"]
    assert hits > 500
    assert hits / (hits + misses) >= 0.99
    assert native_allocations() - native == after["requests"] - before["requests"] - hits
    assert driver().faults == []


def train_model(pool: Any, model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(256, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        pool.plan_now()


@alone
def test_unmarked_training_hits_after_the_plan_and_misses_are_native() -> None:
    pool = install()
    for _ in range(40):
        iteration()
        pool.plan_now()
    before, native = counts(pool), native_allocations()
    for _ in range(40):
        iteration()
    after = counts(pool)
    hits, requests = after["hits"] - before["hits"], after["requests"] - before["requests"]
    assert hits / requests >= 0.99
    assert native_allocations() - native == requests - hits
    assert driver().faults == []


@alone
def test_saved_plan_replays_from_the_first_iteration_and_takes_the_arena_once(tmp_path: str) -> None:
    plan = Path(tmp_path) / "train.plan"
    pool = install()
    train(pool)
    pool.save(plan)
    pool.close()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    again, native = install(plan=plan), native_allocations()
    train(again, 3)
    assert (values(again)["misses"], values(again)["hit_rate"]) == (0, 1.0)
    assert native_allocations() - native == 1 + counts(again)["requests"] - values(again)["hits"]
    assert values(again)["hits"] > 80
    assert driver().faults == []


@alone
def test_cache_of_the_warm_up_is_released_when_the_arena_is_taken() -> None:
    pool = install()
    tensor(64 * MIB)
    assert torch.cuda.memory_reserved() >= 64 * MIB
    train(pool)
    assert values(pool)["hits"] > 0
    assert torch.cuda.memory_reserved() < 4 * MIB


@alone
def test_arena_is_released_by_empty_cache_and_taken_again() -> None:
    pool = install()
    train(pool)
    torch.cuda.empty_cache()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    hits = values(pool)["hits"]
    train(pool, 4)
    assert values(pool)["hits"] > hits


@pytest.mark.parametrize("recorded", ["True", "False"])
@alone
def test_memory_of_an_arena_released_for_a_larger_iteration_leaves_the_cache(recorded: str) -> None:
    """The largest buffers come last, and the smaller ones before them would split that memory."""
    pool = install()

    def layers(size: int) -> int:
        kept = [tensor(size) for _ in range(12)]
        free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        del kept
        return free

    for _ in range(8):
        pool.step()
        layers(30 * MIB)
        pool.plan_now()
    assert pool.client.pool.stats()["arena_bytes"] >= 360 * MIB
    pool.client.set_recording(recorded == "True")
    pool.step()
    assert layers(33 * MIB) < 36 * MIB
    assert pool.client.pool.stats()["arena_bytes"] == 0
    assert driver().faults == []


@alone
def test_iterations_smaller_than_a_known_iteration_use_the_idle_arena() -> None:
    pool = install()

    def layers(size: int, first: int = 0) -> int:
        pool.step()
        kept = [tensor((first or size) * MIB), *(tensor(size * MIB) for _ in range(11))]
        held = torch.cuda.memory_reserved()
        del kept
        return held

    def known(size: int) -> None:
        for _ in range(8):
            layers(size)
            pool.plan_now()

    known(30)
    arena = pool.client.pool.stats()["arena_bytes"]
    assert arena == 360 * MIB
    assert layers(20) < arena + 20 * MIB
    known(10)
    assert layers(20) < arena + 20 * MIB, "larger than the iteration before"
    assert layers(20, first=30) < arena + 10 * 20 * MIB, "from the ninth difference on"
    hits = values(pool)["hits"]
    layers(30)
    assert values(pool)["hits"] == hits + 12
    assert pool.client.pool.stats()["arena_bytes"] == arena
    assert driver().faults == []


def run(pool: Any, batches: list[int], gradients: str, size: int) -> int:
    """Train with activations of `batches` MiB; return the most bytes held.

    Args:
        pool: the pool, or None.
        batches: of each iteration, the size of an activation.
        gradients: ``"first"`` in an iteration, or in its ``"middle"``, those of the last one are freed.
        size: of a gradient.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    kept: list[torch.Tensor] = []
    for batch in batches:
        if pool is not None:
            pool.step()
        if gradients == "first":
            kept.clear()
        activations = [tensor(batch * MIB) for _ in range(6)]
        kept.clear()
        while activations:
            tensor(batch * MIB)
            activations.pop()
            kept.append(tensor(size * MIB))
        if pool is not None:
            pool.plan_now()
    kept.clear()
    return int(torch.cuda.max_memory_reserved())


@pytest.mark.parametrize(
    ("batches", "gradients", "size"),
    [
        (6 * "48 " + 4 * "72 ", "first", 4),  # an empty arena is released for a larger iteration
        (8 * "1 ", "middle", 24),  # the arena is taken once the gradients are gone
        (6 * "24 " + 5 * "48 ", "middle", 8),  # an arena to be replaced serves on while it drains
        (8 * "16 " + 8 * "64 ", "middle", 4),  # and is released as soon as it is empty
    ],
)
@alone
def test_changing_iterations_hold_hardly_more_than_with_native(
    batches: str, gradients: str, size: str
) -> None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True,large_segment_size_mb:12")
    sizes = list(map(int, batches.split()))
    native = run(None, sizes, gradients, int(size))
    pool = install()
    assert run(pool, sizes, gradients, int(size)) < native + 90 * MIB
    assert values(pool)["hits"] > 0
    assert driver().faults == []


@alone
def test_cache_is_released_again_once_the_last_iteration_without_arena_has_left_nothing() -> None:
    pool = install()
    run(pool, 9 * [48], "middle", 60)
    assert torch.cuda.memory_reserved() == pool.client.pool.stats()["arena_bytes"] > 0


@alone
def test_arena_is_taken_after_deleted_graphs_have_run() -> None:
    pool, side, source = install(), torch.cuda.Stream(), tensor(MIB)
    for _ in range(12):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            copied = source.clone()
        graph.replay()
        del graph, copied
        pool.step()
        made = [tensor(size * MIB) for size in (1, 2, 3)]
        del made
        pool.plan_now()
    assert values(pool)["hits"] > 0
    assert driver().faults == []


@pytest.mark.parametrize("expandable", ["True", "False"])
@alone
def test_arena_that_does_not_hold_every_plan_is_not_taken(expandable: str) -> None:
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
    pool = install()
    allow(80 * MIB)
    beside: list[torch.Tensor] = []
    hits = []
    for number in range(16):
        pool.step()
        kept = [tensor(8 * MIB)]  # while `beside` leaves no room for the larger plan
        beside.clear()
        kept += [tensor(8 * MIB) for _ in range(5 if number % 2 else 1)]
        kept.clear()
        with pool.dynamic():
            beside.append(tensor(40 * MIB))
        pool.plan_now()
        hits.append(values(pool)["hits"])
    assert (values(pool)["arena_bytes"], hits[8]) == (0, hits[-1])
    assert "no arena of 48 MiB for plan 2" in pool.explain()
    sizes = [segment["total_size"] for segment in torch.cuda.memory_snapshot()]
    assert 16 * MIB not in sizes, "the segment of the former arena"


@alone
def test_free_pages_of_expandable_segments_are_room_for_the_arena() -> None:
    pool = install()
    allow(80 * MIB)
    before = tensor(60 * MIB)
    behind = tensor(4 * MIB)
    del before
    for _ in range(12):
        pool.step()
        for _ in range(2):
            made = [tensor(8 * MIB) for _ in range(6)]
            del made
        pool.plan_now()
    assert values(pool)["arena_bytes"] == 48 * MIB
    assert behind.nbytes == 4 * MIB


# --- installation and removal


@alone
def test_expandable_segments_are_on_unless_the_program_decides_about_them() -> None:
    for own, expected in {
        "": True,
        "garbage_collection_threshold:0.9": True,
        "max_split_size_mb:64": False,
        "expandable_segments:False": False,
    }.items():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        torch._C._accelerator_setAllocatorSettings(own)
        pool = install()
        made = tensor(4 * MIB)
        (segment,) = torch.cuda.memory_snapshot()
        assert segment["is_expandable"] == expected
        del made
        pool.close()
        torch.cuda.empty_cache()


@pytest.mark.parametrize("used", ["True", "False"])
@alone
def test_removal_keeps_planned_tensors_valid_and_leaves_the_rest_to_native(used: str) -> None:
    pool = install()
    data = torch.full((MIB,), 7, dtype=torch.uint8)
    kept = []
    for _ in range(12):
        pool.step()
        kept.clear()
        kept += [data.to("cuda") for _ in range(3)]
        pool.plan_now()
    assert planned(pool, *kept) == [True] * 3
    pool.close()
    assert not mempool.torch.is_installed()
    native = native_allocations()
    others = [torch.full((MIB,), 9, dtype=torch.uint8).to("cuda") for _ in range(6)]
    assert native_allocations() - native == 6
    assert all(torch.equal(one.cpu(), data) for one in kept)
    del others
    if used == "True":  # by another stream: the memory waits for an event
        kept[0].record_stream(torch.cuda.Stream())
    kept.clear()
    torch.cuda.synchronize()
    if used == "True":
        allow(16 * MIB)  # with the arena, which native needs now
        tensor(14 * MIB)
    assert torch.cuda.memory_allocated() == 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_reserved() == 0
    assert driver().faults == []


@alone
def test_tensors_from_before_the_installation_are_freed_by_native() -> None:
    kept = [torch.full((MIB,), number, dtype=torch.uint8).to("cuda") for number in range(4)]
    pool = install()
    train(pool)
    assert [int(one.cpu()[0]) for one in kept] == [0, 1, 2, 3]
    allocated = torch.cuda.memory_allocated()
    kept.clear()
    assert torch.cuda.memory_allocated() == allocated - 4 * MIB
    assert driver().faults == []


@alone
def test_memory_without_pytorchs_cache_goes_back_to_the_device() -> None:
    pool, free = install(), torch.cuda.mem_get_info()[0]
    torch.cuda.caching_allocator_enable(False)
    kept = tensor(8 * MIB)
    torch.cuda.caching_allocator_enable(True)
    del kept
    assert torch.cuda.mem_get_info()[0] == free
    train(pool)
    assert counts(pool)["hits"] > 0


@alone
def test_options_of_the_pluggable_backend_are_refused() -> None:
    for name, value in {"limit": "1GiB", "memory": "growing", "max_reserved": "1GiB"}.items():
        with pytest.raises(UsageError, match=f"{name} is not for backend='guest'"):
            install(**{name: value})
    with pytest.raises(UsageError, match="not pluggable or guest"):
        install(backend="host")
    assert not mempool.torch.is_installed()


@alone
def test_guest_is_the_default_unless_an_option_needs_the_other_backend() -> None:
    for options, guest in (({}, True), ({"memory": "plain"}, False), ({}, False)):  # pluggable is final
        said = logged()
        pool = mempool.torch.install(device="cuda", background=False, **options)
        assert pool.can_be_shared == (not guest)
        assert (torch.cuda.get_allocator_backend(), said) == ("native" if guest else "pluggable", [])
        if guest:
            with pytest.raises(UsageError, match="is PyTorch's: to share it"):
                mempool.Pool(share=pool)
        pool.close()


@pytest.mark.parametrize("missing", ["compiler", "headers"])
@alone
def test_missing_compiler_or_headers_fall_back_to_pluggable_with_a_warning(
    missing: str, tmp_path: str
) -> None:
    os.environ["MEMPOOL_CACHE"] = tmp_path
    if missing == "compiler":
        os.environ["CXX"] = "/nonexistent/c++"
    else:
        compiled_library.CUDA_HEADERS = ("nonexistent.h",)
    said = logged()
    install()
    assert torch.cuda.get_allocator_backend() == "pluggable"
    lines = [line for line in said if "backend='pluggable'" in line]
    assert len(lines) == 1
    assert {"compiler": "/nonexistent/c++", "headers": "CUDA's headers are needed once"}[missing] in lines[0]


@alone
def test_built_guest_needs_neither_compiler_nor_headers() -> None:
    compiled_library.GUEST.build()
    os.environ["CXX"] = "/nonexistent/c++"
    compiled_library.CUDA_HEADERS = ("nonexistent.h",)
    install()
    assert torch.cuda.get_allocator_backend() == "native"


@alone
def test_unknown_release_falls_back_to_pluggable_with_a_warning() -> None:
    warnings.simplefilter("ignore")  # the version was not tested
    torch.__version__ = "2.99.0"
    said = logged()
    install()
    assert torch.cuda.get_allocator_backend() == "pluggable"
    assert [line for line in said if "does not know the allocator of PyTorch 2.99.0" in line]


@alone
def test_tensors_outlive_the_interpreter() -> None:
    pool = install(background=True)
    train(pool)
    globals()["kept"] = tensor(MIB)


# --- streams and threads


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


# --- graphs and private pools


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


# --- functions about a tensor's memory, and about all memory


@pytest.mark.parametrize("expandable", ["True", "False"])
@alone
def test_shared_planned_tensor_is_the_arena_and_an_offset(expandable: str) -> None:
    if expandable == "False":
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    pool = install()
    for _ in range(12):
        pool.step()
        made = [tensor(MIB) for _ in range(3)]
        pool.plan_now()
    assert planned(pool, *made) == [True] * 3
    shared = [one.untyped_storage()._share_cuda_() for one in made]
    if expandable == "False":  # else PyTorch 2.14 writes random bytes into gaps of the handle
        assert len({handle for _, handle, *_ in shared}) == 1
    offsets = [offset for _, _, _, offset, *_ in shared]
    base = made[0].data_ptr() - offsets[0]
    assert [base + offset for offset in offsets] == [one.data_ptr() for one in made]
    for *_, counter, place, _, _ in shared:  # as the other process does at the end
        torch.UntypedStorage._release_ipc_counter(counter, place, device="cuda")
    made.clear()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == 0
    pool.close()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


@alone
def test_out_of_memory_is_natives_error_after_the_arena_was_used() -> None:
    pool = install()
    train(pool)
    seen: list[int] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *_: seen.append(1))
    allow(64 * MIB)
    for count in (1, 2):  # with an arena, and without
        with pytest.raises(
            torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 100\.00 MiB"
        ):
            tensor(100 * MIB)
        assert len(seen) == count
    train(pool, 4)
    assert tensor(MIB).nbytes == MIB
    assert driver().faults == []


@alone
def test_request_that_native_refuses_gets_the_memory_of_the_idle_arena() -> None:
    pool = install()
    for _ in range(12):
        pool.step()
        made = [tensor(8 * MIB) for _ in range(6)]
        del made
        pool.plan_now()
    assert values(pool)["arena_bytes"] == 48 * MIB
    refused: list[Any] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *_: refused.append(1))
    allow(64 * MIB)
    with pool.dynamic():
        inside = tensor(40 * MIB)
        del inside
        larger = tensor(60 * MIB)
    assert larger.nbytes == 60 * MIB
    assert refused == []


@alone
def test_small_requests_that_native_refuses_get_holes_of_the_idle_arena() -> None:
    pool = install()
    for _ in range(12):
        pool.step()
        tensor(8 * MIB)
        pool.plan_now()
    arena, native = values(pool)["arena_bytes"], native_allocations()
    allow(torch.cuda.memory_reserved())
    kept = [tensor(512) for _ in range(8000)]
    assert native_allocations() - native < len(kept)
    assert values(pool)["arena_bytes"] == arena
    del kept
    assert torch.cuda.memory_allocated() == 0


@alone
def test_only_a_recording_has_misses_and_only_a_trace_has_small_requests() -> None:
    pool = install()
    train(pool)

    def known(size: int) -> bool:
        before = pool.client.stats()["blocks"]["total"]
        tensor(size)
        return bool(pool.client.stats()["blocks"]["total"] > before)

    assert (known(123_456), known(100)) == (True, False)
    pool.client.set_recording(False)
    assert (known(123_456), known(100)) == (False, False)
    pool.client.set_tracing(True)
    assert (known(123_456), known(100)) == (True, True)
    pool.client.set_tracing(False)
    assert (known(123_456), known(100)) == (False, False)
    _core.set_history(pool.client, 10)
    assert (known(123_456), known(100)) == (True, True)


@alone
def test_cudnn_benchmark_works() -> None:
    pool = install()
    train(pool)
    torch.backends.cudnn.benchmark = True
    torch.nn.Conv2d(3, 8, 3).to("cuda")(torch.empty(2, 3, 32, 32, device="cuda"))
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize(
    "check",
    [
        "record_stream",
        "graphs",
        "limits",
        "planned",
        "autograd_threads",
        "out_of_memory",
        "statistics",
        "snapshots",
        "loader",
    ],
)
@alone
def test_check_of_a_gpu_holds(check: str) -> None:
    logging.getLogger("mempool").setLevel(logging.ERROR)  # threads without order outgrow an arena
    with silent():
        checks.CHECKS[check](mempool.torch.install(device="cuda", backend="guest"))
    assert driver().faults == []


def test_run_command_serves_a_program_by_the_guest(tmp_path: Path, libraries: dict[str, str]) -> None:
    program, file = Path(__file__).with_name("programs") / "loop.py", tmp_path / "report.json"
    command = [Path(sys.executable).with_name("mempool"), "run", "--backend", "guest", "--json", file]
    environment = {"PYTHONPATH": str(Path(standin.__file__).with_name("startup")), "MEMPOOL_REMEMBER": "0"}
    done = subprocess.run(
        [*command, program, f"--report={tmp_path / 'reported'}"],
        env=os.environ | libraries | environment | {"TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "backend='pluggable'" not in done.stderr
    assert json.loads(file.read_text())["pools"]["torch"]["allocations"] > 0


if __name__ == "__main__":
    run_each_alone(globals())
