"""The kinds of CUDA memory: plain, growing, managed and pinned, on a driver without a GPU."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cores import pattern
from fake_cuda import GETS_MEMORY, KINDS, OUT_OF_MEMORY, FakeCuda, calls, ticking
from pools import run
from programs import Watched, replaced, training

from mempool import OutOfMemoryError, Pool, UsageError, _core

MIB = 1 << 20
LAUNCH_FAILED = 719
#: Attributes of a device, and what may be advised.
HAS_MANAGED, HAS_CONCURRENT_MANAGED, HAS_PAGES = 83, 89, 102
READ_MOSTLY, NOT_READ_MOSTLY, PREFERRED_LOCATION = 1, 2, 3

every_kind = pytest.mark.parametrize("kind", KINDS)


# --- every kind


def test_unknown_memory_kind_and_missing_device_are_refused(fake: FakeCuda) -> None:
    with pytest.raises(ValueError, match="plain, growing, managed, pinned or hosted"):
        fake.device(memory="fast")
    with pytest.raises(RuntimeError, match="no CUDA device 7; the driver sees 2"):
        fake.device(7).check()


@every_kind
@pytest.mark.parametrize("program", [replaced, training])
def test_pool_on_each_memory_kind_records_plans_and_replays(
    fake: FakeCuda, kind: str, program: Callable[[Watched], Callable[[int], None]]
) -> None:
    device = fake.device(memory=kind)
    with Pool(device, background=False) as pool:
        memory = Watched(pool)
        iteration = program(memory)
        run(pool, iteration, 12, marks=True)
        report = pool.report().to_dict()
        assert (report["state"], report["misses"]) == ("replaying", 0)
        memory.free_all()
        assert pool.release()
    assert device.errors == 0


@every_kind
def test_pool_goes_on_after_any_failed_request_for_memory(fake: FakeCuda, kind: str) -> None:
    """Out of memory, and another refusal, at the n-th call of each function that gets memory."""
    for symbol in GETS_MEMORY[kind]:
        for code in (OUT_OF_MEMORY, LAUNCH_FAILED):
            for after in range(6):
                fake.reset()
                device = fake.device(memory=kind)
                pool = _core.Pool(device=device)
                client = _core.Client(pool, "test")
                fake.fail(symbol, code, after=after, times=2)
                live: dict[int, int] = {}
                for size in (3 * MIB, 5000, 9 * MIB, 40 * MIB, 2 * MIB + 4096, 64 * MIB):
                    address = client.allocate(size)
                    assert all(address + size <= a or a + n <= address for a, n in live.items())
                    if address != 0:
                        live[address] = size
                        fake.write(0, address + size - 4096, 4096, 1)
                fake.fail(symbol, times=0)
                assert client.allocate(MIB) != 0
                fake.finish(0)
                assert (device.errors > 0) == (code == LAUNCH_FAILED and fake.calls(symbol) > after)
                del client, pool
                assert (fake.live_bytes(), fake.live_memories) == (0, 0), (symbol, code, after)


@every_kind
def test_lost_device_is_an_error_without_a_crash(fake: FakeCuda, kind: str) -> None:
    """Every call fails from now on, as after an illegal access; memory whose waits fail is kept."""
    fake.by_hand = True
    device = fake.device(memory=kind)
    pool = _core.Pool(device=device)
    client = _core.Client(pool, "test")
    kept, freed = client.allocate(3 * MIB), client.allocate(30 * MIB)
    for symbol in set(fake.log):
        fake.fail(symbol, LAUNCH_FAILED)
    for symbol in ("cuCtxSynchronize", "cuMemUnmap", "cuMemFree_v2", "cuStreamIsCapturing", "cuEventRecord"):
        fake.fail(symbol, LAUNCH_FAILED)
    assert client.free(freed)
    assert client.allocate(50 * MIB) == 0
    pool.trim()
    assert client.free(kept)
    assert device.errors > 0
    assert "CUDA_ERROR_LAUNCH_FAILED (719)" in str(device.last_error)
    assert fake.live_allocations > 0


# --- what a device or a driver lacks


@pytest.mark.parametrize(("kind", "attribute"), [("growing", HAS_PAGES), ("managed", HAS_MANAGED)])
def test_device_without_a_memory_kind_reports_the_lack_and_allocates_nothing(
    fake: FakeCuda, kind: str, attribute: int
) -> None:
    fake.set_attribute(attribute, 0)
    device = fake.device(memory=kind)
    with pytest.raises(RuntimeError, match=f"CUDA device 0 has no {kind} memory"):
        device.check()
    assert _core.Client(_core.Pool(device=device), "test").allocate(4 * MIB) == 0
    assert "CUDA_ERROR_NOT_SUPPORTED" in str(device.last_error)


@every_kind
def test_pool_does_without_a_plan_larger_than_the_device(
    fake: FakeCuda, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only where the device limits the memory: not managed and pinned memory."""

    def train(pool: Pool) -> None:
        for _ in range(6):
            pool.step()
            buffers = [pool.allocate(n * MIB) for n in (20, 20, 20)]
            for address in buffers:
                pool.free(address)
            pool.plan_now()

    with Pool(fake.device(memory=kind), background=False) as pool:
        train(pool)
        pool.save(tmp_path / "large.plan")
        assert pool.release()
    fake.set_capacity(50 * MIB)
    device = fake.device(memory=kind)
    with Pool(device, plan=tmp_path / "large.plan", background=False) as small:
        if kind in ("managed", "pinned"):
            train(small)
            assert small.report().to_dict()["misses"] == 0
        else:
            small.free(small.allocate(20 * MIB))  # as planned, so that the pool asks for the arena
            small.planner._log_news()
            refused = "an arena of 60 MiB cannot be had from the device, which has 30 MiB free of 50 MiB"
            assert refused in caplog.text
            live = [small.allocate(20 * MIB), small.allocate(20 * MIB)]
            with pytest.raises(OutOfMemoryError, match="20,971,520 bytes asked for"):
                small.allocate(20 * MIB)
            for address in live:
                small.free(address)
        address = small.allocate(MIB)
        small.free(address)
        assert device.errors == 0


def test_pages_larger_than_ours_are_refused(fake: FakeCuda) -> None:
    fake.set_granularity(64 * MIB)
    device = fake.device(memory="growing")
    assert _core.Client(_core.Pool(device=device), "test").allocate(4 * MIB) == 0
    assert "cuMemGetAllocationGranularity (67108864 bytes)" in str(device.last_error)


# --- growing


def installed(client: _core.Client, sizes: list[int], offsets: list[int]) -> None:
    client.install(pattern(sizes, offsets))
    client.mark(_core.Mark.STEP)


def test_arena_grows_in_place_beside_live_buffers(fake: FakeCuda) -> None:
    device = fake.device(memory="growing")
    pool = _core.Pool(device=device)
    client = _core.Client(pool, "test")
    installed(client, [MIB, 3 * MIB], [0, MIB])
    first = client.allocate(MIB)
    fake.write(0, first, MIB, 7)
    assert pool.stats()["arena_bytes"] == 4 * MIB
    installed(client, [5 * MIB, 9 * MIB], [MIB, 6 * MIB])
    second = client.allocate(5 * MIB)
    assert second == first + MIB  # the same arena, larger
    assert pool.stats()["arena_bytes"] == 16 * MIB
    fake.write(0, second, 5 * MIB, 8)
    fake.expect(0, first, MIB, 7)
    assert pool.stats()["reserved"]["current"] == fake.live_bytes() == 16 * MIB
    assert client.free(first)
    assert client.free(second)
    assert client.give_back(force=True)
    assert fake.live_bytes() == 0


def test_unused_arena_pages_are_returned_on_request_beside_live_buffers(
    fake: FakeCuda,
) -> None:
    """The next iteration gets the pages again, at the same addresses."""
    fake.set_capacity(64 * MIB)
    device = fake.device(memory="growing")
    pool = _core.Pool(device=device)
    client = _core.Client(pool, "test")
    installed(client, [MIB, 40 * MIB], [0, 2 * MIB])
    first = client.allocate(MIB)
    later = client.allocate(40 * MIB)
    fake.write(0, later, 40 * MIB, 1)
    assert client.free(later)
    assert fake.live_bytes() == 42 * MIB
    assert not client.give_back(force=True)  # the arena is still there
    assert fake.live_bytes() == 2 * MIB
    assert pool.stats()["reserved"]["current"] == 2 * MIB
    client.mark(_core.Mark.STEP)
    other = client.allocate(MIB)  # the first place is taken
    assert client.allocate(40 * MIB) == later
    assert client.stats()["outcomes"]["hit"] == 3
    for address in (first, other, later):
        assert client.free(address)


def test_pages_are_mapped_once_and_unmapped_in_the_same_parts(fake: FakeCuda) -> None:
    """Random parts of a reservation: the driver reports no errors, and kernels reach the mapped rest."""
    memory = calls(fake, memory="growing")
    rng = random.Random(1)
    space = memory.reserve(64 * MIB)
    there: set[int] = set()
    for _ in range(200):
        first = rng.randrange(32)
        last = rng.randrange(first + 1, 33)
        pages = set(range(first, last))
        if there & pages:
            for page in sorted(there & pages):
                memory.decommit(space + page * 2 * MIB, 2 * MIB)
            there -= pages
        else:
            assert memory.commit(space + first * 2 * MIB, (last - first) * 2 * MIB)
            there |= pages
        assert fake.live_bytes() == len(there) * 2 * MIB
        for page in there:
            fake.write(0, space + page * 2 * MIB, 2 * MIB, 1)
        fake.finish(0)
    memory.release(space, 64 * MIB)
    assert (fake.live_bytes(), fake.live_memories, fake.live_allocations) == (0, 0, 0)


def test_partial_mapping_is_undone(fake: FakeCuda) -> None:
    memory = calls(fake, memory="growing")
    fake.set_capacity(9 * MIB)
    space = memory.reserve(64 * MIB)
    assert not memory.commit(space, 10 * MIB)
    assert fake.live_bytes() == 0
    assert memory.commit(space, 8 * MIB)
    memory.release(space, 64 * MIB)


def test_peer_without_access_causes_no_device_error(fake: FakeCuda) -> None:
    device = fake.device(memory="growing")
    memory = calls(fake, device)
    space = memory.reserve(6 * MIB)
    assert memory.commit(space + 4 * MIB, 2 * MIB)
    assert fake.access(space + 4 * MIB) == {0, 1}  # as to plain memory
    fake.fail("cuMemSetAccess", times=1)
    assert memory.commit(space, 2 * MIB)
    assert memory.commit(space + 2 * MIB, 2 * MIB)
    assert (fake.access(space), fake.access(space + 2 * MIB)) == ({0}, {0})
    assert device.errors == 0
    memory.release(space, 6 * MIB)


# --- managed


def test_managed_memory_prefers_its_device(fake: FakeCuda) -> None:
    device = fake.device(1, "managed")
    client = _core.Client(_core.Pool(device=device), "test")
    address = client.allocate(40 * MIB)
    assert fake.advice == [(address, 40 * MIB, PREFERRED_LOCATION, 1)]


def test_managed_memory_without_concurrent_access_gets_no_advice(fake: FakeCuda) -> None:
    fake.set_attribute(HAS_CONCURRENT_MANAGED, 0)
    device = fake.device(memory="managed")
    assert _core.Client(_core.Pool(device=device), "test").allocate(40 * MIB)
    assert fake.advice == []


def page_faults(fake: FakeCuda, *, ahead: bool) -> int:
    """Return the page faults of ten replayed iterations that use 48 MiB on a device of 16 MiB.

    Each buffer is used once, after the allocation.
    """
    fake.reset()
    fake.set_capacity(16 * MIB)
    if not ahead:
        fake.fail("cuMemPrefetchAsync")
    device = fake.device(memory="managed")
    pool = _core.Pool(device=device)
    client = _core.Client(pool, "test")
    sizes = [2 * MIB] * 24
    installed(client, sizes, [2 * MIB * k for k in range(24)])
    before = 0
    for number in range(12):
        if number == 2:
            before = fake.page_faults()
        live = []
        for size in sizes:
            live.append(client.allocate(size))
            fake.write(0, live[-1], size, number)
            fake.finish(0)
        for address in live:
            assert client.free(address)
        client.mark(_core.Mark.STEP)
    assert client.stats()["outcomes"]["hit"] == 12 * 24
    assert (device.errors == 0) == ahead
    return fake.page_faults() - before


def test_plan_prefetches_managed_memory_before_page_faults(fake: FakeCuda) -> None:
    assert page_faults(fake, ahead=False) == 240
    assert page_faults(fake, ahead=True) == 0
    assert fake.calls("cuStreamCreate") == 1


# --- the setting


def test_memory_kind_option_belongs_to_cuda_alone() -> None:
    with pytest.raises(UsageError, match=re.escape("memory='growing'")):
        Pool("host", memory="growing")
    with pytest.raises(UsageError, match="'fast', not plain, growing or managed"):
        Pool("host", memory="fast")


# --- what is refused when memory goes back, and when little is left


def test_page_remains_mapped_after_a_failed_unmap(fake: FakeCuda) -> None:
    memory = calls(fake, memory="growing")
    space = memory.reserve(8 * MIB)
    assert memory.commit(space, 8 * MIB)
    fake.fail("cuMemUnmap", LAUNCH_FAILED, after=1, times=1)
    memory.decommit(space, 6 * MIB)
    assert fake.live_bytes() == 4 * MIB
    assert memory.commit(space, 6 * MIB)
    assert fake.live_bytes() == 8 * MIB
    fake.fail("cuMemUnmap", LAUNCH_FAILED, times=1)
    memory.release(space, 8 * MIB)
    assert fake.live_bytes() == 2 * MIB  # its addresses are nobody else's
    fake.reset()


# --- waiting lets Python run


#: Functions that wait for the pool's lock, by name.
WAITING: dict[str, Callable[[Pool], Any]] = {
    "step": lambda pool: pool.step(),
    "dynamic": lambda pool: pool.dynamic().__enter__(),
    "state": lambda pool: pool.state,
    "explain": lambda pool: pool.explain(),
    "stats": lambda pool: pool.core.stats(),
    "clients": lambda pool: pool.core.clients(),
    "arena_ranges": lambda pool: pool.core.arena_ranges(),
    "owns": lambda pool: pool.core.owns(12345),
    "pinned_ranges": lambda pool: pool.client.pinned_ranges(),
    "other_plans_ranges": lambda pool: pool.client.other_plans_ranges(),
    "patterns": lambda pool: len(pool.client.patterns()),
    "set_recording": lambda pool: pool.client.set_recording(False),
    "wake": lambda pool: pool.client.wake(),
    "check_again_after": lambda pool: pool.client.check_again_after(10),
    "set_retained_limit": lambda pool: pool.client.set_retained_limit(1 << 40),
    "install": lambda pool: pool.client.install(pattern([MIB])),
}


@pytest.mark.parametrize("call", ["trim", "release", "free_elsewhere", "install_there", *WAITING])
def test_waiting_for_the_device_releases_the_interpreter_lock(fake: FakeCuda, call: str) -> None:
    """So does waiting for a thread that waits: a host function queued on a stream may need Python."""
    fake.set_capacity(100 * MIB)
    with Pool(fake.device(), wait_bytes="never", background=False) as pool:
        stream = fake.stream()
        pool.free(pool.allocate(60 * MIB))
        fake.slow("cuCtxSynchronize", 300)
        with ticking() as ticks:
            if call in ("trim", "release"):
                getattr(pool, call)()
            elif call == "free_elsewhere":
                pool.allocate(90 * MIB, stream=stream)  # which waits for the other stream
            elif call == "install_there":
                pool.client.load(None, pattern([MIB]))
                pool.client.install(pattern([80 * MIB]))  # which takes an arena
            else:
                waiting = threading.Thread(target=pool.allocate, args=(90 * MIB,), kwargs={"stream": stream})
                waiting.start()
                time.sleep(0.02)  # enough for a few ticks
                WAITING[call](pool)
                waiting.join()
            assert len(ticks) > 8  # of sixty on an idle machine
        assert fake.calls("cuCtxSynchronize") > 0
        fake.slow("cuCtxSynchronize", 0)


# --- growing memory where it exists


@pytest.mark.parametrize("index", [None, 0])
@pytest.mark.parametrize("kind", ["plain", "growing"])
def test_device_without_growing_memory_has_plain_memory(fake: FakeCuda, kind: str, index: int | None) -> None:
    """The device decides at its first tensor, since the question starts the driver."""
    fake.set_attribute(HAS_PAGES, int(kind == "growing"))
    device = _core.CudaDevice(index, driver=fake.driver, memory="growing", else_plain=True)
    with Pool(device, background=False) as pool:
        if index is not None:
            assert not device.bind(1)
        assert device.bind(0)
        pool.client.device_is_bound()
        assert device.kind == kind
        before = fake.calls("cuMemAlloc_v2")
        pool.free(pool.allocate(8 * MIB))
        assert (fake.calls("cuMemAlloc_v2") > before) == (device.kind == "plain")
    assert device.errors == 0


def test_small_address_space_serves_several_buffers_from_a_segment(fake: FakeCuda) -> None:
    """The driver refuses the address space for all of the GPU's memory."""
    pool = _core.Pool(device=fake.device(memory="growing"))
    client = _core.Client(pool, "test")
    for _ in range(24):
        client.allocate(MIB // 2)
    assert pool.stats()["segments"] == 1
    assert pool.stats()["reserved"]["current"] == 12 * MIB
