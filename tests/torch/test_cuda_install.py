"""Becoming PyTorch's CUDA allocator, without a GPU: what is served and replayed, and what is refused.

PyTorch's side is tests/support/cuda_torch.py, the driver's mempool/rehearsal/native/driver/. Each test is a
process of its own: PyTorch's allocator is changed for good.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from processes import alone, run_each_alone

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from cuda_torch import SETTERS, CudaTorch

import mempool.torch
from mempool import UsageError, _core
from mempool.torch import cuda
from mempool.torch.introspection import statistics
from traces import TraceError

KIB, MIB = 1 << 10, 1 << 20


def install(driver: str, device: str | None = "cuda", **options: object) -> mempool.torch.TensorPool:
    return mempool.torch.install(device=device, driver=driver, **{"background": False, **options})


def train(on: CudaTorch, pool: mempool.Pool, count: int = 12, **where: int) -> None:
    for _ in range(count):
        pool.step()
        on.iteration(**where)
        pool.plan_now()


# --- it serves, records, plans and replays


@alone
def test_reports_before_the_first_step_keep_the_planning_budget(driver: str) -> None:
    CudaTorch(driver)
    pool = install(driver)
    planner = pool.planner
    planner.budget.charge(0.5)
    assert planner.budget.is_left()
    pool.close()


@alone
def test_loop_replays_without_a_miss(driver: str) -> None:
    on = CudaTorch(driver)
    pool = install(driver)
    assert on.allocator is not None
    assert set(on.allocator.addresses) == {"alloc", "free", *SETTERS}
    train(on, pool)
    assert pool.state == "replaying"
    report = pool.report().to_dict()
    assert report["hit_rate"] == 1.0
    assert report["hits"] > 100
    assert on.fake.faults == []


@alone
def test_every_memory_option_replays_in_a_single_growing_arena(driver: str) -> None:
    on = CudaTorch(driver)
    for memory, symbol in (("growing", "cuMemMap"), ("managed", "cuMemAllocManaged")):
        pool = install(driver, memory=memory)
        train(on, pool)
        assert (pool.state, pool.report().to_dict()["hit_rate"]) == ("replaying", 1.0)
        assert on.fake.calls(symbol) > 0
        pool.close()
    assert on.fake.calls("cuMemAlloc_v2") == 0
    assert on.fake.faults == []


@alone
def test_install_initializes_no_driver(driver: str) -> None:
    """Visible devices can still be chosen, and a forked child can use CUDA."""
    on = CudaTorch(driver)
    pool = install(driver)
    assert str(pool.report())
    assert str(mempool.torch.diagnose())
    child = os.fork()
    if child == 0:
        on.free(on.alloc(MIB))
        os._exit(on.fake.calls("cuInit"))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert on.fake.calls("cuInit") == 0
    on.free(on.alloc(MIB))
    assert on.fake.calls("cuInit") == 1


@alone
def test_loop_replays_with_a_background_planner_and_no_marks(driver: str) -> None:
    on = CudaTorch(driver)
    pool = install(driver, background=True)
    until = time.monotonic() + 120
    while pool.state != "replaying" and time.monotonic() < until:
        on.iteration()
        time.sleep(0.001)
    for _ in range(20):
        on.iteration()
    assert pool.report().to_dict()["hit_rate"] > 0.9
    assert on.fake.faults == []


@alone
def test_saved_plan_replays_from_the_first_iteration(driver: str, tmp_path: str) -> None:
    """Also where it is not known before the first tensor which device has the arena."""
    on = CudaTorch(driver)
    plan = Path(tmp_path) / "train.plan"
    pool = install(driver)
    train(on, pool)
    pool.save(plan)
    pool.close()
    again = install(driver, plan=plan)
    train(on, again, 3)
    report = again.report().to_dict()
    assert (report["misses"], report["hit_rate"]) == (0, 1.0)


@alone
def test_remaining_allocator_functions(driver: str) -> None:
    on = CudaTorch(driver)
    pool = install(driver, max_reserved=100 * MIB)
    address = on.alloc(3 * MIB)
    base, size = on.base_of(address)
    assert base <= address
    assert address + 3 * MIB <= base + size
    assert size >= 20 * MIB  # a segment that others share
    assert on.base_of(12345) == (12345, 0)
    on.free(address)
    on.empty_cache()
    assert on.fake.live_allocations == 0
    on.fake.set_capacity(1000 * MIB)
    on.set_memory_fraction(0.05)
    assert pool.core.stats()["max_reserved_bytes"] == 50 * MIB
    on.set_memory_fraction(1.0)
    assert pool.core.stats()["max_reserved_bytes"] == 100 * MIB  # the user's own bound stays


@alone
def test_side_stream_read_delays_reuse(driver: str) -> None:
    on = CudaTorch(driver)
    pool = install(driver)
    pool.core.set_retained_limit(1 << 40)
    side = on.fake.stream()
    address = on.alloc(MIB)
    on.fake.write(0, address, MIB, 7)
    on.fake.finish(0)
    on.fake.expect(side, address, MIB, 7)
    on.record_stream(address, side)
    on.free(address)
    other = on.alloc(MIB)
    assert other != address
    on.fake.finish(side)
    on.free(other)
    assert {on.alloc(MIB), on.alloc(MIB)} == {address, other}
    assert on.fake.faults == []


# --- which device


@alone
def test_cuda_is_the_default_with_a_gpu(driver: str) -> None:
    on = CudaTorch(driver)
    pool = install(driver, None)
    assert isinstance(pool, cuda.CudaPool)
    assert on.allocator is not None


@alone
def test_cpu_is_the_default_without_a_gpu(driver: str) -> None:
    on = CudaTorch(driver, sees=False)
    with mempool.torch.install(background=False) as pool:
        assert not isinstance(pool, cuda.CudaPool)
    assert on.allocator is None


@alone
def test_first_allocating_device_is_planned_and_others_are_served(
    driver: str,
) -> None:
    on = CudaTorch(driver)
    pool = install(driver)
    on.empty_cache()
    on.release_pool(0, 5)  # a former pool's graph on another device: neither decides anything
    train(on, pool, device=1)
    assert pool.report().to_dict()["hit_rate"] == 1.0
    here, there = on.alloc(MIB, device=1), on.alloc(MIB, device=0)
    assert pool.core.owns(here)
    assert not pool.core.owns(there)
    assert on.fake.live_bytes(0) > 0
    plain = _core.torch_cuda_plain(0)
    assert plain.stats()["blocks"]["current"] == 1
    on.free(there, device=0)
    on.free(here, device=1)
    assert plain.stats()["blocks"]["current"] == 0


@alone
def test_device_index_is_accepted(driver: str) -> None:
    on = CudaTorch(driver)
    pool = install(driver, "cuda:1")
    first, second = on.alloc(MIB, device=0), on.alloc(MIB, device=1)
    assert [pool.core.owns(first), pool.core.owns(second)] == [False, True]


# --- what is refused


@alone
def test_refused_arguments_leave_pytorch_unchanged(driver: str, tmp_path: str) -> None:
    on = CudaTorch(driver)
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
            install(**{"driver": driver} | options)
        assert on.allocator is None
        assert not mempool.torch.is_installed()
    with install(driver, mode="off") as pool:
        assert mempool.torch.installed() is pool
    assert on.allocator is None
    install(driver, "cuda:1")


@alone
def test_initialized_cuda_is_an_error(driver: str) -> None:
    on = CudaTorch(driver, in_use=True)
    with pytest.raises(UsageError, match="CUDA is in use already"):
        install(driver)
    torch.cuda.is_initialized = lambda: False  # somebody else has made the allocator work
    with pytest.raises(UsageError, match=r"does not take another allocator.*already initialized"):
        install(driver)
    assert not mempool.torch.is_installed()
    assert on.allocator is None
    on.in_use = False
    install(driver)
    assert on.allocator is not None


@alone
def test_build_without_cuda_is_an_error(driver: str) -> None:
    CudaTorch(driver, lacks=("everything",))
    for name in (driver, "libno-such.so"):
        with pytest.raises(UsageError, match="built without CUDA"):
            install(name)
    assert not mempool.torch.is_installed()


@alone
def test_old_pytorch_error_names_the_missing_functions(driver: str) -> None:
    on = CudaTorch(driver, lacks=("set_release_pool", "set_record_stream_fn"))
    with pytest.raises(UsageError, match=r"lacks set_record_stream_fn, set_release_pool; 2\.11 and later"):
        install(driver)
    assert on.allocator is None


@alone
def test_second_install_is_refused_and_the_first_continues(driver: str) -> None:
    on = CudaTorch(driver)
    pool = install(driver)
    with pytest.raises(UsageError, match="has a pool already"):
        install(driver)
    assert pool.core.owns(on.alloc(MIB))


# --- the end of a pool


@alone
def test_closed_pool_serves_without_plans(driver: str) -> None:
    on = CudaTorch(driver)
    pool = install(driver)
    train(on, pool)
    tensor = on.alloc(MIB)
    on.fake.write(0, tensor, MIB, 9)
    allocator = on.allocator
    pool.close()
    assert not mempool.torch.is_installed()
    assert on.allocator is allocator
    assert (pool.state, pool.client.patterns()) == ("closed", 0)
    hits = pool.client.stats()["outcomes"]["hit"]
    for _ in range(5):
        on.iteration()
    assert pool.client.stats()["outcomes"]["hit"] == hits
    assert pool.report().to_dict()["hits"] == hits  # of its time
    assert pool.core.owns(on.alloc(KIB))
    on.fake.expect(0, tensor, MIB, 9)
    on.fake.finish(0)
    on.free(tensor)
    assert on.fake.faults == []


@alone
def test_plan_installed_during_close_is_not_replayed(driver: str) -> None:
    on = CudaTorch(driver)
    pool = install(driver)
    train(on, pool)
    assert pool.planned is not None
    planner, stop = pool.planner, pool.planner.stop

    def plan_and_stop(*seconds: float) -> None:  # it ends after the solve that runs
        planner.learner.builder.install(pool.planned, None)
        stop(*seconds)

    planner.stop = plan_and_stop
    pool.close()
    assert pool.client.patterns() == 0


@alone
def test_next_pool_takes_over_and_former_tensors_return_to_their_pool(driver: str) -> None:
    on = CudaTorch(driver)
    first = install(driver)
    old = on.alloc(MIB)
    on.fake.write(0, old, MIB, 5)
    first.close()
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            on.free(on.alloc(4096))

    threads = [threading.Thread(target=go_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        second = install(driver)
        second.close()
    second = install(driver)
    over.set()
    for thread in threads:
        thread.join()
    assert _core.torch_cuda_plain(0) is None  # nobody was without a pool in between
    new = on.alloc(MIB)
    assert [first.core.owns(old), second.core.owns(old)] == [True, False]
    assert [first.core.owns(new), second.core.owns(new)] == [False, True]
    train(on, second)
    assert second.report().to_dict()["hit_rate"] == 1.0
    on.fake.expect(0, old, MIB, 5)
    on.fake.finish(0)
    assert _core.torch_cuda_hook(driver).held() == 2
    on.free(old)
    assert first.core.stats()["live_blocks"] == 0
    assert _core.torch_cuda_hook(driver).held() == 1
    on.free(new)
    assert on.fake.faults == []


@alone
def test_tensors_outlive_the_interpreter(driver: str) -> None:
    """The pool closes when Python exits, with tensors alive, and nothing is said."""
    on = CudaTorch(driver)
    pool = install(driver, background=True)
    train(on, pool)
    on.alloc(MIB)


# --- threads


@alone
def test_threads_with_and_without_the_gil_are_served(driver: str) -> None:
    on = CudaTorch(driver)
    pool = install(driver, background=True)
    streams = [0, on.fake.stream()]

    def work(number: int) -> None:
        for _ in range(60):
            on.iteration(stream=streams[number % 2], gil=number < 2)
            if number == 0:
                pool.step()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not on.live
    assert pool.core.stats()["live_blocks"] == 0
    assert sum(pool.client.stats()["outcomes"].values()) == 4 * 60 * 30
    assert on.fake.faults == []


# --- what is asked of CUDA memory, at any time


@alone
def test_statistics_answer_before_the_first_tensor(driver: str) -> None:
    on = CudaTorch(driver)
    pool = install(driver)
    for name in ("_cuda_memoryStats", "_cuda_resetPeakMemoryStats", "_cuda_record_memory_history"):
        setattr(torch._C, name, on.raises)
    on.see_devices(2)
    statistics.replace_functions(
        cuda.serving_client
    )  # where PyTorch lacks them nothing was replaced at install
    for device in range(2):
        torch.cuda.reset_peak_memory_stats(device)
        assert torch.cuda.memory_allocated(device) == 0
    torch.cuda.memory._record_memory_history()
    address = on.alloc(MIB, device=1)
    assert (torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)) == (0, MIB)
    assert len(_core.snapshot(pool.core, pool.client)[2]) > 0
    on.free(address, device=1)


@alone
def test_free_never_waits_for_the_device(driver: str) -> None:
    on = CudaTorch(driver)
    install(driver)
    for number in range(200):
        for address in [on.alloc((1 + number % 7) * MIB + 4096 * k) for k in range(10)]:
            on.free(address)
    assert on.fake.calls("cuCtxSynchronize") == 0
    assert on.fake.calls("cuMemFree_v2") == 0


@alone
def test_cache_of_a_former_pool_is_used_before_out_of_memory(driver: str) -> None:
    on = CudaTorch(driver)
    on.fake.set_capacity(200 * MIB)
    first = install(driver)
    kept = on.alloc(12 * MIB)
    on.free(on.alloc(120 * MIB))
    first.close()
    install(driver)
    big = on.alloc(100 * MIB)
    on.free(big)
    on.free(kept)
    assert on.fake.faults == []


@alone
def test_memory_fraction_holds_for_the_next_pool(driver: str) -> None:
    on = CudaTorch(driver)
    pool = install(driver)
    for device in range(2):
        on.set_memory_fraction(0.25, device)
    assert pool.index is None
    on.free(on.alloc(MIB, device=1), device=1)
    assert pool.index == 1
    limit = pool.core.stats()["max_reserved_bytes"]
    assert limit < 1 << 62
    pool.close()
    second = install(driver)
    on.free(on.alloc(MIB, device=1), device=1)
    assert second.core.stats()["max_reserved_bytes"] == limit


@alone
def test_driver_error_is_not_out_of_memory(driver: str, translated: str) -> None:
    on = CudaTorch(driver)
    install(driver)
    on.fake.fail("cuMemAlloc_v2", 700)
    with pytest.raises(RuntimeError, match=r"CUDA error: .*700") as caught:
        on.alloc_as_pytorch(translated, 100 * MIB)
    assert not isinstance(caught.value, torch.OutOfMemoryError)


@alone
def test_cudnn_benchmark_stays_off(driver: str) -> None:
    CudaTorch(driver)
    values: list[bool] = []
    torch._C._set_cudnn_benchmark = values.append
    install(driver)
    torch.backends.cudnn.benchmark = True
    assert True not in values


# --- memory runs out


@alone
def test_out_of_memory_is_pytorchs_own_error(driver: str, translated: str) -> None:
    on = CudaTorch(driver)
    install(driver, max_reserved=64 * MIB)
    assert on.alloc_as_pytorch(translated, MIB) != 0
    said = r"CUDA out of memory\. Tried to allocate 100\.00 MiB\. GPU 0 has .*limited to 64\.00 MiB"
    with pytest.raises(torch.OutOfMemoryError, match=said):
        on.alloc_as_pytorch(translated, 100 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="There is no CUDA device 7"):
        on.alloc_as_pytorch(translated, MIB, device=7)
    assert on.alloc_as_pytorch(translated, MIB) != 0


@alone
def test_missing_compiler_gives_another_error_and_a_single_warning(
    driver: str, translated: str, tmp_path: str
) -> None:
    on = CudaTorch(driver)
    os.environ.update(MEMPOOL_CACHE=tmp_path, CXX="/nonexistent/c++")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mempool").addHandler(handler)
    install(driver, max_reserved=64 * MIB).close()
    install(driver, max_reserved=64 * MIB)
    assert len([line for line in said if "instead of torch.OutOfMemoryError" in line]) == 1
    with pytest.raises(RuntimeError, match=r"^CUDA out of memory\. Tried") as caught:
        on.alloc_as_pytorch(translated, 100 * MIB)
    assert not isinstance(caught.value, torch.OutOfMemoryError)


if __name__ == "__main__":
    run_each_alone(globals())
