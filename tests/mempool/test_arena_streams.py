"""Several streams in one arena: reuse of memory freed by another stream waits for that free only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cores import Core, pattern

if TYPE_CHECKING:
    from mempool import _core

SIZES = [4096, 8192, 1024, 2048]
APART = [0, 4096, 12288, 13312]
BYTES = sum(SIZES)


def two_streams(*, shared: bool, order: tuple[int, int] = (0, 5)) -> _core.Pattern:
    """Plans of stream 0 and stream 5 with equal sizes, at the same addresses or behind each other."""
    offsets = APART if shared else [BYTES + offset for offset in APART]
    first, second = order
    return pattern(SIZES, APART, stream=first, others=[(1, second, SIZES, offsets)])


def waits(core: Core) -> int:
    count: int = core.pool.stats()["stream_waits"]
    return count


@pytest.mark.parametrize("page", [0, 4096])
def test_streams_take_turns_with_the_same_addresses(page: int) -> None:
    core = Core(page=page)
    core.client.load(None, two_streams(shared=True))
    for _ in range(10):
        core.step()
        assert core.run(SIZES) == 4
        assert core.run(SIZES, stream=5) == 4
    assert core.misses == 0
    assert core.device.counts().committed <= max(BYTES, 4 * page + BYTES)
    # The other's buffers were freed last to first: the wait for the first place covers all of them.
    assert waits(core) >= 2 * 10 - 1
    core.give_everything_back()


def test_streams_without_shared_addresses_do_not_wait_and_a_single_stream_has_no_events() -> None:
    core = Core()
    core.client.load(None, two_streams(shared=False))
    for iteration in range(10):
        core.step()
        assert core.run(SIZES) + core.run(SIZES, stream=5) == 8
        if iteration == 0:
            first = waits(core)  # nobody has watched what the first one did while it was alone
    assert waits(core) == first <= 1
    assert core.device.counts().events_alive <= 1
    core.give_everything_back()
    core = Core()
    core.client.load(None, pattern(SIZES, APART, stream=7))
    assert core.run(SIZES, stream=7) == 4
    assert (waits(core), core.device.counts().events_alive) == (0, 0)


def test_live_events_are_bounded() -> None:
    """Frees in shared slots record an event each; events without a waiter are forgotten."""
    core = Core()
    core.client.load(None, two_streams(shared=True))
    core.step()
    core.run(SIZES, stream=5)
    for _ in range(200):
        core.step()
        assert core.run(SIZES) == 4
    assert 0 < core.device.counts().events_alive <= 2 * 32
    core.give_everything_back()
    assert core.device.counts().events_alive == 0


def test_stream_waits_only_once_for_the_same_free() -> None:
    core = Core()
    core.client.load(None, two_streams(shared=True))
    core.step()
    core.run(SIZES)
    addresses = [core.allocate(size, 5) for size in SIZES]
    first = waits(core)
    for address in addresses:  # in the order of their allocation
        core.free(address, 5)
    core.step()
    core.run([], stream=5)
    assert [core.allocate(size, 5) for size in SIZES] == addresses
    assert waits(core) == first


def test_stream_does_not_wait_during_a_graph_capture() -> None:
    """An event recorded then would belong to the graph."""
    core = Core()
    core.client.load(None, two_streams(shared=True))
    core.step()
    assert core.run(SIZES) == 4
    core.pool.begin_graph((1, 0), [9])
    core.device.capture([9])
    assert core.run(SIZES, stream=5) == 0
    assert core.outcomes["other_stream"] == 4
    core.device.capture([])
    core.pool.end_graph((1, 0))
    core.step()
    assert core.run(SIZES, stream=5) == 4
    core.pool.release_graph((1, 0))
    core.give_everything_back()


@pytest.mark.parametrize("late", [False, True])
def test_plan_of_another_process_maps_streams_by_their_first_allocations(late: bool) -> None:
    """Stream handles have no meaning in another process."""
    core = Core()
    if late:
        core.run([1000], stream=111)
        core.run([1000], stream=222)
    core.client.load(None, two_streams(shared=True, order=(31, 47)))
    before = core.misses
    for _ in range(3):
        assert core.run(SIZES, stream=111) + core.run(SIZES, stream=222) == 8
    assert core.misses == before
    core.give_everything_back()


def test_streams_beyond_the_number_of_tracked_streams_are_served() -> None:
    core = Core()
    streams = range(20)
    others = [(k, k, SIZES, APART) for k in streams[1:]]
    core.client.load(None, pattern(SIZES, APART, others=others))
    for _ in range(3):
        for stream in streams:
            assert core.run(SIZES, stream=stream) == (4 if stream < 15 else 0)
    assert core.outcomes["other_stream"] == 3 * 4 * 5
    core.give_everything_back()


def test_holes_of_an_arena_are_anothers_only_when_memory_runs_out() -> None:
    core = Core(page=0, capacity=1 << 20)
    core.client.load(None, pattern([512 << 10, 1024]))
    core.run([512 << 10, 1024])
    core.client.enter_dynamic()
    core.allocate(400 << 10, 5)
    assert core.arena_live_ranges == 0
    core.allocate(400 << 10, 5)
    assert core.arena_live_ranges == 1
    assert waits(core) == 1


def test_pool_without_stream_sharing_waits_for_the_device_instead() -> None:
    """Once, for the first stream's frees before the second appeared; with shared addresses rarely."""
    core = Core(share_streams=False)
    core.client.load(None, two_streams(shared=False))
    for _ in range(10):
        core.step()
        assert core.run(SIZES) + core.run(SIZES, stream=5) == 8
    assert waits(core) == core.device.counts().synchronizes == 1
    assert core.device.counts().events_alive == 0
    core = Core(share_streams=False)
    core.client.load(None, two_streams(shared=True))
    for _ in range(300):
        core.step()
        core.run(SIZES)
        core.run(SIZES, stream=5)
    assert 1 < waits(core) < 8
    assert core.outcomes["other_stream"] > 1000
    core.give_everything_back()
