"""Fallback memory of each CUDA kind: retained and returned memory, on a driver without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cores import pattern
from fake_cuda import GETS_MEMORY, KINDS

from mempool import UsageError, _core
from mempool.cuda_callbacks import CallbackPool
from mempool.settings import EVERYTHING

if TYPE_CHECKING:
    from fake_cuda import FakeCuda

MIB = 1 << 20

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_streams_in_turn_do_not_take_memory_from_each_other(fake: FakeCuda, kind: str) -> None:
    """Memory freed by another stream would be waited for, returned, and taken again each time."""
    pool = _core.Pool(device=fake.device(memory=kind))
    client = _core.Client(pool, "test")
    client.set_retained_limit(EVERYTHING)
    streams, taken = (fake.stream(), 0), list[int]()
    for _ in range(20):
        for stream in streams:
            client.free(client.allocate(30 * MIB, stream), stream)
        taken.append(sum(fake.calls(symbol) for symbol in GETS_MEMORY[kind]))
    assert taken[0] == taken[-1]


@every_kind
def test_growth_on_a_captured_stream_waits_for_nothing(fake: FakeCuda, kind: str) -> None:
    """A wait would break the capture by another library, unknown to the pool."""
    pool = _core.Pool(device=fake.device(memory=kind))
    client = _core.Client(pool, "test")
    client.set_retained_limit(EVERYTHING)
    stream = fake.stream()
    for address in [client.allocate(20 * MIB, stream) for _ in range(8)]:
        client.free(address, stream)
    fake.begin_capture(stream)
    address = client.allocate(300 * MIB, stream)
    assert not fake.is_broken(stream)
    fake.end_capture(stream)
    client.free(address, stream)


@every_kind
def test_no_arena_is_taken_within_a_capture(fake: FakeCuda, kind: str) -> None:
    """The capture belongs to another library, unknown to the pool; the next iteration has the arena."""
    pool = _core.Pool(device=fake.device(memory=kind))
    client = _core.Client(pool, "test")
    stream, sizes = fake.stream(), [30 * MIB, 20 * MIB, 40 * MIB]

    def iteration() -> None:
        client.mark(_core.Mark.STEP)
        for address in [client.allocate(size, stream) for size in sizes]:
            client.free(address, stream)

    client.set_retained_limit(EVERYTHING)
    iteration()
    client.install(pattern(sizes, low_water=1, stream=stream, sequence=1))  # 0: of the marks
    fake.begin_capture(stream)
    iteration()
    assert pool.stats()["arena_bytes"] == 0
    assert not fake.is_broken(stream)
    fake.end_capture(stream)
    for _ in range(2):
        iteration()
    assert pool.stats()["arena_bytes"] >= sum(sizes)


@every_kind
def test_buffers_growing_with_each_token_leave_no_unusable_memory(fake: FakeCuda, kind: str) -> None:
    """A cache of keys and values is a little larger each time, and allocated before the former is freed."""
    pool = _core.Pool(device=fake.device(memory=kind))
    client = _core.Client(pool, "test")
    client.set_retained_limit(EVERYTHING)
    caches = [client.allocate(11 * MIB, 0) for _ in range(4)]
    for size in range(11 * MIB, 20 * MIB, MIB // 4):
        for number, before in enumerate(caches):
            caches[number] = client.allocate(size, 0)
            client.free(before, 0)
    assert pool.stats()["reserved"]["peak"] < 1.5 * 5 * 20 * MIB
    for cache in caches:
        client.free(cache, 0)


def test_allocation_on_a_captured_stream_is_refused_and_the_pool_goes_on(fake: FakeCuda) -> None:
    """The graph would use the memory long after the memory has another owner."""
    stream, side = fake.stream(), fake.stream()
    with CallbackPool(0, driver=fake.driver, name="captured", background=False) as pool:
        before = pool.take(MIB, stream)
        fake.begin_capture(stream)
        fake.fork(stream, side)
        for captured in (stream, side):
            with pytest.raises(UsageError, match="allocate before the capture"):
                pool.take(MIB, captured)
        other = pool.take(MIB)
        pool.give(before, stream)
        assert not fake.is_broken(stream)
        fake.destroy_graph(fake.end_capture(stream))
        for address in (pool.take(MIB, stream), other):
            pool.give(address, 0)
