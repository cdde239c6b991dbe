"""Installation as PyTorch's CUDA allocator, on PyTorch's CUDA build and the stand-in.

Each test is a process of its own: PyTorch's allocator is changed for good.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from processes import alone, run_each_alone

if __name__ == "__main__":  # pytest's own process has no stand-in, without which PyTorch cannot be imported
    import torch
    from standin_torch import driver

    import mempool.torch
    from mempool import Pool, UsageError, _core
    from mempool.cuda_callbacks import CallbackPool
    from mempool.torch import cuda
    from traces import TraceError

KIB, MIB = 1 << 10, 1 << 20


def install(**options: Any) -> mempool.torch.TensorPool:
    return mempool.torch.install(**{"device": "cuda", "backend": "pluggable", "background": False, **options})


def tensor(size: int, device: str = "cuda") -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def train(pool: mempool.torch.TensorPool, count: int = 12, device: str = "cuda") -> None:
    for _ in range(count):
        pool.step()
        iteration(device)
        pool.plan_now()


def iteration(device: str = "cuda") -> None:
    """Run a forward and a backward pass like those of a training."""
    kept = []
    for layer in range(10):
        kept.append(tensor(4096 * (layer % 3 + 1), device))
        tensor(10_000 + 512 * layer, device)
    while kept:
        tensor(30_000, device)
        kept.pop()


def owned(pool: mempool.torch.TensorPool, *tensors: torch.Tensor) -> list[bool]:
    return [pool.core.owns(one.data_ptr()) for one in tensors]


# --- it serves, records, plans and replays


@pytest.mark.parametrize(
    ("memory", "symbol"),
    [("plain", "cuMemAlloc_v2"), ("growing", "cuMemMap"), ("managed", "cuMemAllocManaged")],
)
@alone
def test_loop_replays_without_a_miss(memory: str, symbol: str) -> None:
    pool = install(memory=memory)
    train(pool)
    report = pool.report().to_dict()
    assert (pool.state, report["hit_rate"]) == ("replaying", 1.0)
    assert report["hits"] > 100
    assert driver().calls(symbol) > 0
    assert memory == "plain" or driver().calls("cuMemAlloc_v2") == 0
    assert driver().faults == []


@alone
def test_install_initializes_no_driver() -> None:
    """Visible devices can still be chosen, and a forked child can use CUDA."""
    pool = install()
    assert str(pool.report())
    assert str(mempool.torch.diagnose())
    child = os.fork()
    if child == 0:
        tensor(MIB)
        os._exit(torch.cuda.memory_reserved() < MIB)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert driver().calls("cuInit") == 0
    assert not torch.cuda.is_initialized()


@alone
def test_saved_plan_replays_from_the_first_iteration(tmp_path: str) -> None:
    """Also where it is not known before the first tensor which device has the arena."""
    plan = Path(tmp_path) / "train.plan"
    pool = install()
    train(pool)
    pool.save(plan)
    pool.close()
    again = install(plan=plan)
    train(again, 3)
    report = again.report().to_dict()
    assert (report["misses"], report["hit_rate"]) == (0, 1.0)


# --- which device


@alone
def test_device_is_cuda_with_a_gpu_and_the_cpu_without() -> None:
    count = torch.cuda.device_count
    torch.cuda.device_count = lambda: 0
    with install(device=None) as pool:
        assert not isinstance(pool, cuda.CudaPool)
    assert not cuda.is_serving()
    torch.cuda.device_count = count
    assert isinstance(install(device=None), cuda.CudaPool)


@alone
def test_first_allocating_device_is_planned_and_others_are_served() -> None:
    pool = install()
    torch.cuda.empty_cache()  # decides nothing
    train(pool, device="cuda:1")
    assert pool.report().to_dict()["hit_rate"] == 1.0
    here, there = tensor(MIB, "cuda:1"), tensor(MIB, "cuda:0")
    assert owned(pool, here, there) == [True, False]
    plain = _core.torch_cuda_plain(0)
    assert plain is not None
    assert plain.stats()["blocks"]["current"] == 1
    del here, there
    assert plain.stats()["blocks"]["current"] == 0


# --- what is refused


@alone
def test_refused_arguments_leave_pytorch_unchanged(tmp_path: str) -> None:
    plan = Path(tmp_path) / "bad.plan"
    plan.write_text("not a plan")
    refused: list[tuple[str, dict[str, Any]]] = [
        ("no CUDA device 2", {"device": "cuda:2"}),
        ("no device", {"device": "cuda:x"}),
        ("no device", {"device": "cuda:-1"}),
        (r"no CUDA driver: libno-such\.so", {"driver": "libno-such.so"}),
        ("on the host only", {"check": True}),
        ("not a whole Parquet file", {"plan": plan}),
        ("not plain, growing or managed", {"memory": "fast"}),
    ]
    for reason, options in refused:
        with pytest.raises((UsageError, TraceError), match=reason):
            install(**options)
        assert torch.cuda.get_allocator_backend() == "native"
        assert not mempool.torch.is_installed()
    with install(mode="off") as pool:
        assert mempool.torch.installed() is pool
    assert torch.cuda.get_allocator_backend() == "native"
    install(device="cuda:1")
    assert torch.cuda.get_allocator_backend() == "pluggable"


@alone
def test_cuda_in_use_is_an_error() -> None:
    kept = tensor(MIB)
    with pytest.raises(UsageError, match="CUDA is in use already"):
        install()
    assert not mempool.torch.is_installed()
    assert torch.cuda.memory_allocated() == kept.nbytes


@alone
def test_another_pluggable_allocator_is_an_error() -> None:
    functions = _core.torch_cuda_functions()
    other = torch._C._cuda_customAllocator(functions["alloc"], functions["free"])
    torch.cuda.memory.change_current_allocator(torch.cuda.memory._CUDAAllocator(other))
    with pytest.raises(UsageError, match="another library has plugged its allocator in already"):
        install()


@alone
def test_pytorch_without_a_function_of_the_allocator_is_an_error() -> None:
    torch._C._cuda_customAllocator = lambda *_: object()
    with pytest.raises(UsageError, match=r"lacks .*set_record_stream_fn.*; 2\.11 and later have them"):
        install()
    assert torch.cuda.get_allocator_backend() == "native"


@alone
def test_second_install_is_refused_and_the_first_continues() -> None:
    pool = install()
    with pytest.raises(UsageError, match="has a pool already"):
        install()
    assert owned(pool, tensor(MIB)) == [True]


# --- the end of a pool


@alone
def test_closed_pool_serves_without_plans() -> None:
    pool = install()
    train(pool)
    data = torch.full((MIB,), 9, dtype=torch.uint8)
    kept = data.to("cuda")
    pool.close()
    assert not mempool.torch.is_installed()
    assert (pool.state, pool.client.patterns()) == ("closed", [])
    hits = pool.client.stats()["outcomes"]["hit"]
    for _ in range(5):
        iteration()
    assert pool.client.stats()["outcomes"]["hit"] == hits
    assert pool.report().to_dict()["hits"] == hits  # of its time
    assert owned(pool, tensor(KIB)) == [True]
    assert torch.equal(kept.cpu(), data)
    assert driver().faults == []


@alone
def test_plan_installed_during_close_is_not_replayed() -> None:
    pool = install()
    train(pool)
    assert pool.planned is not None
    planner, stop = pool.planner, pool.planner.stop

    def plan_and_stop(*seconds: float) -> None:  # it ends after the solve that runs
        planner.learner.builder.install(pool.planned, None)
        stop(*seconds)

    planner.stop = plan_and_stop
    pool.close()
    assert pool.client.patterns() == []


@alone
def test_next_pool_takes_over_and_former_tensors_return_to_their_pool() -> None:
    first = install()
    data = torch.full((MIB,), 5, dtype=torch.uint8)
    old = data.to("cuda")
    first.close()
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            tensor(4096)

    threads = [threading.Thread(target=go_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        second = install()
        second.close()
    second = install()
    over.set()
    for thread in threads:
        thread.join()
    assert _core.torch_cuda_plain(0) is None  # nobody was without a pool in between
    new = tensor(MIB)
    assert (owned(first, old, new), owned(second, old, new)) == ([True, False], [False, True])
    train(second)
    assert second.report().to_dict()["hit_rate"] == 1.0
    assert torch.equal(old.cpu(), data)
    del old
    assert first.core.stats()["live_blocks"] == 0
    del new
    assert driver().faults == []


@alone
def test_tensors_outlive_the_interpreter() -> None:
    """The pool closes when Python exits, with tensors alive, and nothing is said."""
    pool = install(background=True)
    train(pool)
    globals()["kept"] = tensor(MIB)


# --- what is asked of CUDA memory, at any time


@alone
def test_statistics_answer_before_the_first_tensor() -> None:
    pool = install()
    for device in range(2):
        torch.cuda.reset_peak_memory_stats(device)
        assert torch.cuda.memory_allocated(device) == 0
    torch.cuda.memory._record_memory_history()
    kept = tensor(MIB, "cuda:1")
    assert (torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)) == (0, kept.nbytes)
    assert len(_core.snapshot(pool.core, pool.client)[2]) > 0


@alone
def test_accelerator_functions_answer_from_the_pool() -> None:
    install()
    assert torch.accelerator.memory_allocated() == 0
    kept = tensor(30 * MIB)
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() == kept.nbytes
    assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved()
    del kept
    assert torch.accelerator.max_memory_allocated() == 30 * MIB
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == 0
    torch.accelerator.empty_cache()
    assert torch.cuda.memory_reserved() == 0


@alone
def test_cudnn_benchmark_stays_off() -> None:
    logging.getLogger("mempool").setLevel(logging.ERROR)
    torch.backends.cudnn.benchmark = True
    install()
    for _ in range(2):
        assert not torch.backends.cudnn.benchmark
        torch.nn.Conv2d(3, 8, 3).to("cuda")(torch.empty(2, 3, 32, 32, device="cuda"))
        torch.backends.cudnn.benchmark = True


@alone
def test_free_never_waits_for_the_device() -> None:
    install()
    for number in range(200):
        _ = [tensor((1 + number % 7) * MIB + 4096 * k) for k in range(10)]
    assert driver().calls("cuCtxSynchronize") == 0
    assert driver().calls("cuMemFree_v2") == 0


@alone
def test_memory_fraction_holds_for_the_next_pool_beside_the_users_bound() -> None:
    pool = install(max_reserved=100 * MIB)
    bound = torch.cuda.get_device_properties(1).total_memory // 1024
    for device in range(2):
        torch.cuda.set_per_process_memory_fraction(1 / 1024, device)
    tensor(MIB, "cuda:1")
    assert pool.index == 1
    assert pool.core.stats()["max_reserved_bytes"] == bound < 100 * MIB
    pool.close()
    second = install(max_reserved=100 * MIB)
    tensor(MIB, "cuda:1")
    assert second.core.stats()["max_reserved_bytes"] == bound
    torch.cuda.set_per_process_memory_fraction(1.0, 1)
    assert second.core.stats()["max_reserved_bytes"] == 100 * MIB


# --- memory runs out


@alone
def test_out_of_memory_names_the_limit_and_the_next_request_is_served() -> None:
    install(max_reserved=64 * MIB)
    kept = tensor(MIB)
    said = r"CUDA out of memory\. Tried to allocate 100\.00 MiB\. GPU 0 has .*limited to 64\.00 MiB"
    with pytest.raises(torch.OutOfMemoryError, match=said):
        tensor(100 * MIB)
    assert tensor(MIB).data_ptr() != kept.data_ptr()


@alone
def test_missing_compiler_gives_another_error_and_a_single_warning(tmp_path: str) -> None:
    os.environ.update(MEMPOOL_CACHE=tmp_path, CXX="/nonexistent/c++")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mempool").addHandler(handler)
    install(max_reserved=64 * MIB).close()
    install(max_reserved=64 * MIB)
    assert len([line for line in said if "instead of torch.OutOfMemoryError" in line]) == 1
    with pytest.raises(RuntimeError, match=r"^CUDA out of memory\. Tried") as caught:
        tensor(100 * MIB)
    assert not isinstance(caught.value, torch.OutOfMemoryError)


@alone
def test_driver_error_is_not_out_of_memory() -> None:
    install()
    tensor(MIB)
    driver().fail("cuMemCreate", 700)
    with pytest.raises(RuntimeError, match=r"CUDA error: .*700") as caught:
        tensor(100 * MIB)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    driver().fail("cuMemCreate", 0, times=0)


@alone
def test_cache_of_a_former_pool_is_used_before_out_of_memory() -> None:
    first = install()
    kept = tensor(12 * MIB)
    late = tensor(120 * MIB)
    first.close()
    install()
    held = driver().live_bytes()
    del late
    assert driver().live_bytes() == held
    driver().set_capacity(held + 70 * MIB)
    assert tensor(100 * MIB).nbytes + kept.nbytes == 112 * MIB
    assert driver().faults == []


# --- memory that others use too


def other_pool(index: int | None = 0, **options: Any) -> CallbackPool:
    return CallbackPool(index, name="other", background=False, **options)


@alone
def test_memory_moves_between_pytorch_and_another_client_and_back() -> None:
    other = other_pool()
    pool = install(share=other)
    where = tensor(MIB).data_ptr()
    reserved = other.core.stats()["reserved"]["current"]
    assert other.take(MIB) == where
    assert pool.report().to_dict()["requested_bytes"] == 0
    assert other.report().to_dict()["requested_bytes"] == MIB
    other.give(where, 0)
    assert tensor(MIB).data_ptr() == where
    assert other.core.stats()["reserved"]["current"] == reserved
    assert driver().faults == []


@alone
def test_tensor_lies_in_its_reservation() -> None:
    """PyTorch asks for the reservation before it shares a tensor."""
    pool = install(memory="plain")
    made, size = tensor(MIB), ctypes.c_size_t()
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t))
    base = function(_core.torch_cuda_functions()["set_base_alloc_fn"])(made.data_ptr(), size)
    assert base is not None
    assert base <= made.data_ptr() < made.data_ptr() + MIB <= base + size.value
    assert size.value == pool.core.stats()["reserved"]["current"]


@alone
def test_each_client_of_shared_memory_replays_its_plan() -> None:
    pool = install()
    tensor(MIB)  # now it is known which device it is
    other = other_pool(None, share=pool)
    for _ in range(12):
        train(pool, 1)
        other.step()
        for address in [other.take(size) for size in range(4096, 40_000, 4096)]:
            other.give(address, 0)
        other.plan_now()
    assert pool.report().to_dict()["hit_rate"] == other.report().to_dict()["hit_rate"] == 1.0
    assert driver().faults == []


@alone
def test_shared_device_is_pytorchs_device() -> None:
    pool = install()
    other = other_pool(None, share=pool)
    other.bind(1)
    assert pool.index == 1
    kept = tensor(MIB, "cuda:1")
    assert other.core.owns(kept.data_ptr())


@alone
def test_shared_streams_need_consent() -> None:
    with pytest.raises(UsageError, match="make that pool with wait_bytes='never'"):
        install(share=other_pool(wait_bytes=0))
    with pytest.raises(UsageError, match="is no pool of a CUDA device"):
        install(share=Pool(background=False))
    install(share=other_pool(wait_bytes=0), wait_bytes=0)


@alone
def test_next_pool_on_the_same_memory_counts_leftovers() -> None:
    other = other_pool()
    former = install(share=other)
    kept = tensor(MIB)
    former.close()
    pool = install(share=other)
    assert pool.report().to_dict()["requested_bytes"] == kept.nbytes
    del kept
    gc.collect()
    assert pool.report().to_dict()["requested_bytes"] == 0
    assert driver().faults == []


if __name__ == "__main__":
    run_each_alone(globals())
