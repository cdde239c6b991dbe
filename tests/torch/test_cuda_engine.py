"""Copies on streams: correct in any order in which streams can run, without waits of the host.

Random programs of PyTorch's CUDA build within a limit are in tests/rehearsal/test_random_programs.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from fake_streams import FakeRuntime

from mempool.errors import UsageError
from mempool.torch.eager.mode import OffloadMode
from mempool.torch.eager.storages import StorageRegistry
from mempool.torch.eager.transfers import OffloadCounters, TransferManager
from mempool.torch.offload import cuda_engine, pinned_memory
from mempool.torch.offload.cuda_engine import CudaEngine
from mempool.torch.offload.engine import HostFullError, OffloadRefusedError
from mempool.torch.offload.host_memory import PAGE
from mempool.torch.offload.link import SIZES
from mempool.torch.offload.options import OPTIONS, OffloadOptions
from solvers.swap import Link

SIZE = 256
CPU = torch.device("cpu")


def trained(limit: int | None, *, seed: int = 0) -> tuple[list[str], list[Any], Any]:
    """Train a model with copies as late as possible; return losses, parameters and counters of swapping."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    runtime = FakeRuntime(seed, eager=True)
    swapper: Any = contextlib.nullcontext()
    if limit is not None:
        made = CudaEngine(CPU, 1 << 24, runtime=runtime)
        made._link = Link.of_rate(1e9)
        swapper = OffloadMode(made, CPU, limit)
    losses = []
    with swapper:
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(512, 32)).square().mean()
            loss.backward()
            losses.append(loss.item().hex())
            optimizer.step()
    return losses, [one.detach().clone() for one in model.parameters()], swapper


def test_training_is_bit_identical_with_late_copies() -> None:
    losses, parameters, _ = trained(None)
    _, _, whole = trained(1 << 40)
    for seed in range(2):
        same, alike, swapper = trained(whole.counts.peak_bytes // 2, seed=seed)
        assert swapper.counts.out_bytes > 0
        assert swapper.counts.peak_bytes <= swapper.limit_bytes
        assert same == losses
        assert all(torch.equal(one, other) for one, other in zip(parameters, alike, strict=True))


def engine(host: int = 1 << 20, **options: int) -> tuple[FakeRuntime, CudaEngine]:
    runtime = FakeRuntime(**options)
    return runtime, CudaEngine(CPU, host, runtime=runtime)


def bytes_of(engine: CudaEngine, copy: Any) -> set[int]:
    return set(ctypes.string_at(engine.address(copy), copy.size))


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_late_streams_wait_for_copies_and_copies_for_them(seed: int, lends: bool) -> None:
    """The tensor's stream had work before the engine was made; another stream moves the tensor."""
    runtime, made = engine(seed=seed)
    late, memory = runtime.stream(), torch.zeros(SIZE, dtype=torch.uint8)
    late.do(lambda: memory.fill_(7))
    made.mark()
    copy, leaving = made.offload(memory)
    made.wait(leaving)
    again = torch.zeros(SIZE, dtype=torch.uint8)
    made.wait(made.reload(copy, again))
    storages = StorageRegistry(CPU, 64)
    record = storages.register(again, again.untyped_storage(), None, 0)
    wrong = list[str]()
    with runtime.using(late):
        if lends and record is not None:
            TransferManager(made, storages, OffloadCounters()).lend(record)
        else:
            made.note_stream()
        late.do(lambda: wrong.extend([] if again.eq(7).all() else ["read before it was back"]))
        late.do(lambda: memory.fill_(9))  # the memory serves the next request on this stream
    runtime.finish()
    assert wrong == []
    assert bytes_of(made, copy) == {7}


def test_cuda_is_not_initialized_before_the_program_does() -> None:
    """In a CPU build of PyTorch, a use of CUDA would raise an error."""
    made = CudaEngine(torch.device("cuda", 3), 1 << 20)
    made.note_stream()
    made.fence()
    assert made.seconds([made.mark(), made.mark()]) == [0.0]
    assert made.host_bytes == 0
    made.close()


def test_forked_child_does_not_use_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, made = engine()
    copy, transfer = made.offload(torch.zeros(SIZE, dtype=torch.uint8))
    runtime.finish()
    monkeypatch.setattr(made, "_process", -1)
    monkeypatch.setattr(made, "_runtime", None)  # any use raises an error
    made.note_stream()
    made.fence()
    made.mark()
    assert made.wait(transfer) == 0.0
    with pytest.raises(OffloadRefusedError, match="no forked child"):
        made.offload(torch.zeros(SIZE, dtype=torch.uint8))
    with pytest.raises(UsageError, match="no forked child"):
        made.reload(copy, torch.zeros(SIZE, dtype=torch.uint8))
    made.close()


def test_memory_read_by_reloads_is_reused_in_stream_order() -> None:
    runtime, made = engine(host=PAGE)
    left, target = torch.full((SIZE,), 7, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
    copy, _ = made.offload(left)
    made.reload(copy, target)
    with pytest.raises(HostFullError, match="for copies are left on the host"):
        made.offload(left)
    made.drop(copy)
    made.drop(copy)
    made.offload(torch.full((SIZE,), 9, dtype=torch.uint8))
    with pytest.raises(HostFullError):
        made.offload(left)
    assert not target.any()  # no wait was made
    runtime.finish()
    assert target.eq(7).all()


def test_pinned_memory_is_bounded_and_copies_lie_in_a_single_part() -> None:
    runtime, made = engine(host=300 << 20)
    copies = [made.offload(torch.zeros(20 << 20, dtype=torch.uint8))[0] for _ in range(12)]
    assert made.host_bytes <= 300 << 20
    locks = runtime.locks
    with pytest.raises(HostFullError):
        made.offload(torch.zeros(40 << 20, dtype=torch.uint8))
    assert runtime.locks == locks
    assert len({copy.at for copy in copies}) == 12
    made.close()


def test_memory_that_cuda_refuses_to_lock_is_pageable_within_the_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime, made = engine(host=4 * PAGE, lockable=3 * PAGE)
    data = [torch.full((2 * PAGE,), value, dtype=torch.uint8) for value in (1, 2)]
    copies = [made.offload(one)[0] for one in data]
    with pytest.raises(HostFullError):
        made.offload(data[0])
    assert made.host_bytes == 4 * PAGE
    assert made.link().out_fixed > 0  # of pageable memory too
    runtime.finish()
    assert [bytes_of(made, copy) for copy in copies] == [{1}, {2}]
    (warning,) = caplog.messages
    assert "CUDA page-locks no 8,192 B (8 KiB) of the host's memory beside 8,192 B (8 KiB)" in warning


@pytest.mark.parametrize(("allowed", "remedy"), [(1 << 20, "`ulimit -l` allows"), (1, "memory are free")])
def test_refused_lock_names_the_limit_of_locked_memory_if_that_applies(
    allowed: int, remedy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinned_memory.resource, "getrlimit", lambda _: (allowed, allowed))
    pinned_memory.warn_of_refused_lock(PAGE, PAGE)
    assert remedy in caplog.text


def test_reservation_locks_as_much_as_cuda_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "OPTIONS", OffloadOptions(pinned_step_bytes=PAGE))
    _, made = engine(host=20 * PAGE, lockable=7 * PAGE)
    made.reserve(16 * PAGE)
    assert made.host_bytes == 7 * PAGE


def test_memory_unused_for_many_iterations_is_unlocked_after_its_copies() -> None:
    runtime, made = engine(host=300 << 20)
    kept, large = (torch.zeros(size, dtype=torch.uint8) for size in (PAGE, 80 << 20))
    made.offload(kept)
    copy, _ = made.offload(large)
    target = torch.ones_like(large)
    made.wait(made.reload(copy, target))
    made.drop(copy)
    for _ in range(OPTIONS.pinned_idle_iterations - 1):
        made._free_dropped(wait=True)  # as before a copy into freed memory
        made.end_iteration()
    assert made.host_bytes == 144 << 20
    made.end_iteration()  # the fake memory refuses to be unlocked under a copy
    made.end_iteration()
    assert made.host_bytes == 64 << 20
    assert not target.any()
    assert runtime.locks == 2


@pytest.mark.parametrize("seed", range(10))
def test_adjacent_unused_parts_join_for_a_larger_copy(seed: int) -> None:
    """Copies keep their places, and each lies in memory that was locked at once."""
    draw, most, copies = random.Random(seed), 64 * PAGE, dict[int, int]()
    memory = FakeRuntime().locked(most)
    arena, joined = pinned_memory.PinnedArena(memory, most), 0
    for _ in range(200):
        size = draw.randint(1, 24) * PAGE
        if draw.random() < 0.5:
            arena.reserve(arena.size + size)
        elif copies and draw.random() < 0.6:
            at = draw.choice(list(copies))
            arena.release(at, copies.pop(at))
        else:
            if (at := arena.allocate(size)) is None and arena.join(size):
                joined += 1
                at = arena.allocate(size)
                assert at is not None
            if at is not None:
                copies[at] = size
        places = sorted(copies.items())
        assert all(at + size <= later for (at, size), (later, _) in itertools.pairwise(places))
        assert all(any(b <= at and at + size <= e for b, e in memory._parts) for at, size in places)
        assert arena.used == sum(copies.values())
        assert sum(e - b for b, e in memory._parts) == arena.size <= most
    assert joined


def test_planned_bytes_are_locked_at_once() -> None:
    runtime, made = engine(host=300 << 20)
    made.reserve(200 << 20)
    for _ in range(10):
        made.offload(torch.zeros(20 << 20, dtype=torch.uint8))
    made.reserve(100 << 20)
    assert runtime.locks == 1
    made.close()


def test_copy_lies_at_the_planned_offset_of_a_dropped_copy() -> None:
    """If the dropped copy is still being reloaded, the next copy waits."""
    runtime, made = engine(host=8 * PAGE)
    made.reserve(6 * PAGE)
    data, target = (torch.full((2 * PAGE,), k, dtype=torch.uint8) for k in (7, 0))
    first, _ = made.offload(data, 4 * PAGE)
    assert first.at == 4 * PAGE
    made.reload(first, target)
    made.drop(first)
    second, _ = made.offload(torch.full((2 * PAGE,), 9, dtype=torch.uint8), 4 * PAGE)
    assert second.at == 4 * PAGE
    third, _ = made.offload(data, 4 * PAGE)
    assert third.at != 4 * PAGE
    runtime.finish()
    assert target.eq(7).all()
    assert bytes_of(made, second) == {9}
    made.close()


def test_graph_capture_refuses_offloads_and_reloads() -> None:
    runtime, made = engine()
    copy, _ = made.offload(torch.zeros(SIZE, dtype=torch.uint8))
    runtime.graph = True
    tasks = len(runtime.main.tasks)
    made.mark()
    assert len(runtime.main.tasks) == tasks
    with pytest.raises(OffloadRefusedError, match="a graph is captured"):
        made.offload(torch.zeros(SIZE, dtype=torch.uint8))
    with pytest.raises(UsageError, match="a tensor that the CUDA graph uses is on the host"):
        made.reload(copy, torch.zeros(SIZE, dtype=torch.uint8))


def test_marks_exclude_stream_waits() -> None:
    runtime, made = engine()
    first = made.mark()
    runtime.finish()
    _, transfer = made.offload(torch.zeros(SIZE, dtype=torch.uint8))
    assert made.wait(transfer) == 0.0
    made._out.tasks.appendleft(lambda: setattr(runtime, "now", runtime.now + 1000))
    made._out.tasks.appendleft(transfer.waits[0][0])  # ends a second after the wait starts
    last = made.mark()
    (seconds,) = made.seconds([first, last])
    assert made.take_waits() == [made.waited(transfer)]
    assert made.waited(transfer) > 0.9
    assert made.take_waits() == []
    assert seconds < 0.1


def test_marks_exclude_waits_while_memory_is_prepared() -> None:
    runtime, made = engine()
    first = made.mark()

    def prepare(_: Any) -> None:
        runtime.finish()
        runtime.now += 1000

    last = made.mark(prepare)
    (seconds,) = made.seconds([first, last])
    assert seconds < 0.1


def test_tensor_of_another_device_is_refused() -> None:
    _, made = engine()
    with pytest.raises(OffloadRefusedError, match="what lies on meta does not leave cpu"):
        made.offload(torch.zeros(SIZE, dtype=torch.uint8, device="meta"))


def test_finished_copies_release_their_data_without_a_wait() -> None:
    runtime, made = engine()
    _, transfer = made.offload(torch.zeros(SIZE, dtype=torch.uint8))
    made.mark()
    assert transfer.data is not None
    runtime.finish()
    made.mark()
    assert transfer.data is None
    assert made.waited(transfer) == 0.0


class Driver:
    """The functions of libcuda that page-lock memory."""

    def __init__(self, _: str) -> None:
        self.locked: dict[int, int] = {}

    def cuMemHostRegister_v2(self, address: Any, size: Any, flags: int) -> int:  # noqa: N802
        assert flags == 1 | 2  # portable, and mapped for kernels
        assert address.value % PAGE == size.value % PAGE == 0
        if sum(self.locked.values()) + size.value > 10 * PAGE:
            return 2
        self.locked[address.value] = size.value
        return 0

    def cuMemHostUnregister(self, address: Any) -> int:  # noqa: N802
        del self.locked[address.value]
        return 0


def test_pinned_memory_is_locked_and_unlocked_by_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned_memory.ctypes, "CDLL", Driver)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: None)
    memory = pinned_memory.PinnedMemory(20 * PAGE, CPU)
    assert memory.lock(0, 4 * PAGE)
    assert not memory.lock(4 * PAGE, 8 * PAGE)
    assert memory.lock(4 * PAGE, 6 * PAGE)
    memory.data(PAGE, 3).fill_(7)
    assert memory.data(PAGE - 1, 5).tolist() == [0, 7, 7, 7, 0]
    driver = memory._driver
    assert len(driver.locked) == 2
    memory.release(0, 4 * PAGE)
    assert len(driver.locked) == 1
    assert memory.data(PAGE, 1).tolist() == [0]  # fresh pages
    memory.close()
    assert driver.locked == {}


def test_link_is_measured_by_device_events_and_unlocks_its_memory() -> None:
    runtime, made = engine()
    link = made.link()
    assert link is made.link()
    assert runtime.locks == 1
    assert made.host_bytes == 0
    assert link.out_fixed > 0
    assert max(SIZES) * link.out_per_byte < 1e-2  # each copy of the fake takes some milliseconds


def test_measurement_registers_no_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_engine, "SIZES", (1, PAGE))
    monkeypatch.setattr(cuda_engine, "measure", lambda copies: copies.timed(PAGE, out=True, back=True))
    _, made = engine()
    with OffloadMode(made, CPU, 1 << 30) as swapper:
        assert made.link()
        assert swapper.storages.resident_bytes == 0
