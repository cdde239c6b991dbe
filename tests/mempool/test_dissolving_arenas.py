"""Arenas of pages converted to segments before any out-of-memory error.

Free arena memory serves other requests.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cores import STEP, Core, pattern
from hypothesis import given
from hypothesis import strategies as st
from sequences import NETWORKS, varied

from mempool import Pool, _core
from mempool.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fake_cuda import FakeCuda

PAGE = 4096
KIB, MIB = 1 << 10, 1 << 20
#: In the arena every second one will live, so that no hole is larger than one of them.
SIZES = [64 * KIB] * 32
LIMIT = 3 << 20  # the arena and half as much
LARGER = 300 * KIB  # more than any hole


def half_full(limit: int = LIMIT, page: int = PAGE) -> tuple[Core, list[int]]:
    """Return a core within an iteration in which every second buffer is live, and the live buffers."""
    core = Core(page=page, limit=limit)
    core.client.install(pattern(SIZES))
    core.step()
    assert core.run(SIZES) == len(SIZES)
    core.step()
    addresses = [core.allocate(size) for size in SIZES]
    for address in addresses[::2]:
        core.free(address)
    return core, addresses[1::2]


def dissolved(core: Core) -> int:
    count: int = core.pool.stats()["arena_conversions"]
    return count


def arena(core: Core) -> int:
    size: int = core.pool.stats()["arena_bytes"]
    return size


def pages(ranges: Iterable[tuple[int, int]]) -> int:
    """Return the bytes of the pages that the (address, size) pairs touch."""
    touched: set[int] = set()
    for address, size in ranges:
        touched.update(range(address // PAGE, (address + size - 1) // PAGE + 1))
    return PAGE * len(touched)


def served(core: Core, room: int) -> int:
    """Assert that as many buffers of LARGER as fit into the given bytes are served. Return their number."""
    count = room // LARGER
    for _ in range(count):
        core.allocate(LARGER)
    return count


def test_converted_arena_serves_all_free_memory() -> None:
    core, alive = half_full()
    assert served(core, LIMIT - len(alive) * SIZES[0]) == 6
    assert dissolved(core) == 1
    assert arena(core) == 0
    core.give_everything_back()


def test_planned_slots_of_live_buffers_are_known_after_conversion() -> None:
    core, alive = half_full()
    places = [core.client.planned_offset_of(address) for address in alive]
    assert all(place is not None for place in places)
    served(core, LARGER * 4)
    assert dissolved(core) == 1
    assert [core.client.planned_offset_of(address) for address in alive] == places


def test_arena_without_pages_is_not_converted() -> None:
    core, _ = half_full(page=0)
    while address := core.client.allocate(LARGER, 0):
        core.live[address] = LARGER
    assert (dissolved(core), arena(core)) == (0, sum(SIZES))


def test_next_iteration_has_its_plan_again_after_conversion() -> None:
    core, alive = half_full()
    served(core, LIMIT - len(alive) * SIZES[0])
    for address in list(core.live):
        core.free(address)
    core.step()
    assert core.run(SIZES) == len(SIZES)


def test_arena_is_recreated_with_backoff_after_recurring_conversions() -> None:
    """The arena is recreated at once after a long time in use."""
    core = Core(limit=LIMIT)
    core.client.install(pattern(SIZES))

    def iteration(*, odd: bool) -> None:
        core.step()
        addresses = [core.allocate(size) for size in SIZES]
        for address in addresses[::2]:
            core.free(address)
        if odd:
            served(core, LARGER * 4)
        for address in list(core.live):
            core.free(address)

    for _ in range(400):
        iteration(odd=True)
    habit = dissolved(core)
    assert 6 <= habit <= 6 + 400 // 64 + 1
    for _ in range(140):
        iteration(odd=False)
    iteration(odd=True)
    assert dissolved(core) == habit + 1
    before = core.hits
    iteration(odd=False)
    assert core.hits == before + len(SIZES)


def test_live_buffers_keep_whole_pages() -> None:
    """Half of the arena is free; of its pages of two buffers each, none or every second page is free."""
    sizes = [MIB] * 64
    for apart in (True, False):
        core = Core(page=2 * MIB, limit=72 * MIB, large=4 * MIB, shared=16 * MIB)
        core.client.install(pattern(sizes))
        core.step()
        core.run(sizes)
        core.step()
        for number, address in enumerate([core.allocate(size) for size in sizes]):
            if number % 2 == 0 if apart else number % 4 < 2:
                core.free(address)
        assert (core.client.allocate(20 * MIB, 0) == 0) == apart
        assert (dissolved(core), arena(core)) == ((0, 64 * MIB) if apart else (1, 0))


def test_addresses_reserved_beyond_the_arena_are_not_used_as_memory() -> None:
    """An arena reserves ample addresses, to grow in place."""
    core, _ = half_full()
    served(core, LARGER * 4)
    assert core.pool.stats()["segment_largest_free_bytes"] < LIMIT
    for address in list(core.live):
        core.free(address)
    core.pool.trim()
    assert core.committed == 0


def test_converted_arena_is_recreated_only_at_the_next_iteration() -> None:
    """Not for a plan installed meanwhile, nor when all memory is free again."""
    core, _ = half_full()
    served(core, LARGER * 4)
    for address in list(core.live):
        core.free(address)
    core.client.install(pattern([*SIZES, 512]))
    core.free(core.allocate(5000))
    assert (dissolved(core), arena(core)) == (1, 0)
    core.step()
    assert arena(core) > 0


def test_arena_is_not_converted_where_the_device_has_too_little_memory(fake: FakeCuda) -> None:
    sizes = [8 * MIB] * 16
    with Pool(fake.device(memory="growing"), background=False) as pool:
        pool.client.load(None, pattern(sizes))
        pool.step()
        alive = [pool.allocate(size) for size in sizes]
        for address in alive[::2]:
            pool.free(address)
        fake.set_capacity(160 * MIB)
        with pytest.raises(MemoryError):
            pool.allocate(97 * MIB)
        assert pool.report().to_dict()["arena_conversions"] == 0
        large = pool.allocate(88 * MIB)
        assert pool.report().to_dict()["arena_conversions"] == 1
        for address in [large, *alive[1::2]]:
            pool.free(address)


@pytest.mark.parametrize("asked", [LIMIT, 1 << 50])
def test_arena_is_not_converted_for_a_request_too_large_anyway(asked: int) -> None:
    core, alive = half_full()
    assert core.client.allocate(asked, 0) == 0
    assert (dissolved(core), arena(core), core.arena_live_ranges) == (0, sum(SIZES), len(alive))


def test_device_memory_of_other_programs_counts_against_the_limit() -> None:
    core, alive = half_full(limit=(1 << 64) - 1)
    core.device.set_capacity(core.committed)
    assert served(core, sum(SIZES) - len(alive) * SIZES[0]) == 3
    assert dissolved(core) == 1


def test_arena_is_not_converted_during_a_graph_capture() -> None:
    core, _ = half_full()
    core.pool.begin_graph((1, 1), [7])
    while address := core.client.allocate(LARGER, 0):
        core.live[address] = LARGER
    assert (dissolved(core), arena(core)) == (0, sum(SIZES))
    core.pool.end_graph((1, 1))
    core.allocate(LARGER)
    assert dissolved(core) == 1


def test_live_buffers_keep_their_contents_through_conversion() -> None:
    pool = _core.Pool(device=_core.HostDevice(), max_reserved=256 << 20)
    client = _core.Client(pool, "test")
    sizes = [4 << 20] * 40
    client.install(pattern(sizes))
    client.mark(STEP)
    addresses = [client.allocate(size, 0) for size in sizes]
    for i, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
        ctypes.memset(address, i, size)
    for address in addresses[::2]:
        assert client.free(address, 0)
    more = [client.allocate(9 << 20, 0) for _ in range(18)]
    assert all(more)
    assert pool.stats()["arena_conversions"] == 1
    for address in more:
        ctypes.memset(address, 255, 9 << 20)
    for i, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
        if i % 2:
            assert ctypes.string_at(address, size) == bytes([i]) * size
    for address in [*addresses[1::2], *more]:
        assert client.free(address, 0)
    assert client.stats()["live"]["current"] == 0
    pool.trim()
    assert pool.stats()["reserved"]["current"] == 0


def test_each_client_counts_its_own_buffers_after_conversion() -> None:
    core = Core(limit=LIMIT)
    first, core.client = core.client, _core.Client(core.pool, "second")
    core.client.install(pattern(SIZES))
    core.step()
    alive = [core.allocate(size) for size in SIZES]
    for address in alive[::2]:
        core.free(address)
    assert core.hits == len(SIZES)
    served(core, LARGER * 4)
    assert dissolved(core) == 1
    for address in alive[1::2]:
        del core.live[address]
        assert first.free(address, 0)
    assert core.client.stats()["live"]["current"] == -(-LARGER // 512) * 512 * len(core.live)
    assert first.stats()["live"]["current"] == 0


def test_converted_memory_waits_for_uses_and_frees_by_other_streams() -> None:
    """The waits cover uses by other streams, and frees by streams other than the buffer's own."""
    core, alive = half_full()
    served(core, LARGER * 4)
    for address in alive[:4]:
        core.client.use(address, 1)
        core.free(address)
    for address in alive[4:8]:
        core.free(address, 1)
    waits = core.pool.stats()["deferred"]["current"]
    assert waits == 8 * SIZES[0]
    for address in alive[8:]:
        core.free(address)
    freed = set(alive[:8])
    while address := core.client.allocate(SIZES[0], 0):
        assert address not in freed
        if len(core.live) > 200:
            break
        core.live[address] = SIZES[0]
    core.device.finish(1)
    core.give_everything_back()


def test_streams_keep_theirs() -> None:
    core = Core(limit=LIMIT)
    core.client.install(
        pattern(SIZES[:16], others=[(1, 1, SIZES[:16], [*range(1 << 20, 2 << 20, 64 * KIB)])])
    )
    for _ in range(3):
        core.step()
        for stream in (0, 1):
            core.run(SIZES[:16], stream)
    core.step()
    on = {stream: [core.allocate(size, stream) for size in SIZES[:16]] for stream in (0, 1)}
    for stream, addresses in on.items():
        for address in addresses[::2]:
            core.free(address, stream)
    served(core, LARGER * 4)
    assert dissolved(core) == 1
    for stream, addresses in on.items():
        for address in addresses[1::2]:
            core.free(address, stream)
    assert core.pool.stats()["deferred"]["current"] == 0
    core.give_everything_back()


sizes_of_programs = st.lists(st.integers(5 * KIB, 400 * KIB), min_size=4, max_size=24)


@given(
    planned=sizes_of_programs,
    asked=st.lists(st.tuples(st.integers(5 * KIB, 900 * KIB), st.integers(0, 3)), max_size=60),
    share=st.floats(1.0, 2.0),
    seed=st.integers(0, 1 << 32),
)
def test_every_request_fitting_beside_the_live_buffers_is_served(
    planned: Sequence[int], asked: Sequence[tuple[int, int]], share: float, seed: int
) -> None:
    """To a page at each end, for any plan and any addresses of the live buffers."""
    random = np.random.default_rng(seed)
    limit = int(share * sum(-(-size // 512) * 512 for size in planned)) + 2 * PAGE
    core = Core(limit=limit)
    core.client.install(pattern(planned))
    for _ in range(2):
        core.step()
        core.run(planned)
    core.step()
    kept = [core.allocate(size) for size in planned]
    for address in random.permutation(kept)[: len(kept) * 2 // 3].tolist():
        core.free(address)
    for number, (size, frees) in enumerate(asked):
        address = core.client.allocate(size, 0)
        if address == 0:
            assert pages(core.live.items()) + size + 2 * PAGE > limit
        else:
            assert all(address + size <= a or a + s <= address for a, s in core.live.items())
            core.live[address] = size
        for _ in range(min(frees, len(core.live))):
            core.free(int(random.choice(list(core.live))))
        if number % 20 == 19:
            core.step()
    core.give_everything_back()


@pytest.mark.parametrize("network", NETWORKS)
def test_iterations_of_any_size_fit_a_limit_two_percent_above_the_peak_load(network: str) -> None:
    """Without marks no early sign tells the pool that an iteration outgrows the plan."""
    trace = varied(network, 2 << 30, 120)
    run = simulate(trace, "planned_growing", limit_bytes=int(1.02 * trace.load().max()))
    assert run.failed_at is None
