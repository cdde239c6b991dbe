"""Sharing, lack and records of memory with the guest in front of PyTorch's own CUDA allocator.

Each test is a process of its own: the guest stays in front of PyTorch's allocator for good.
"""

from __future__ import annotations

from typing import Any

import pytest
from processes import alone, run_each_alone

if __name__ == "__main__":  # pytest's own process has no stand-in, without which PyTorch cannot be imported
    import torch
    from guest_programs import (
        MIB,
        allow,
        install,
        native_allocations,
        planned,
        tensor,
        train,
        values,
    )
    from standin_torch import driver

    from mempool import _core


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


if __name__ == "__main__":
    run_each_alone(globals())
