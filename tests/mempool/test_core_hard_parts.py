"""Hard parts of replay at the level of the native client: see "The hard parts" in the docs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cores import Core, pattern

from mempool import _core

MIB = 1 << 20


def test_planned_address_is_refused_where_any_live_buffer_intersects() -> None:
    """P0 is kept alive, P1 is rejected because of P0, and then K lies over both."""
    core = Core()
    core.client.load(None, pattern([1000, 1500, 2500], [0, 512, 0]))
    p0 = core.allocate(1000)
    p1 = core.allocate(1500)
    assert core.outcomes["slot_occupied"] == 1
    k = core.allocate(2500)
    assert core.outcomes["slot_occupied"] == 2
    assert len({p0, p1, k}) == 3
    assert core.arena_live_ranges == 1


# --- unplanned requests


def arena_of(core: Core, address: int) -> bool:
    """Return whether an address lies in the arena, judged by the effect of the free."""
    before = core.arena_live_ranges
    core.free(address)
    return core.arena_live_ranges < before


def test_fallback_takes_free_segments_first_then_holes_then_the_device() -> None:
    core = Core()
    core.pool.set_retained_limit(1 << 30)
    core.client.load(None, pattern([600_000, 700], [0, 700_416]))
    core.allocate(6_000_000)  # so that idle memory is a small part below
    spare = core.allocate(300_000)
    core.free(spare)
    core.run(range(2000, 11_000, 1000))  # far out of step
    assert core.allocate(300_000) == spare  # a free segment
    committed = core.committed
    hole = core.allocate(300_000)
    assert core.committed == committed
    assert arena_of(core, hole)
    core.allocate(900_000)  # fits no hole
    assert core.committed > committed


def test_program_following_its_plan_avoids_arena_holes_about_to_be_used() -> None:
    core = Core()
    core.client.load(None, pattern([600_000, 700_000]))
    core.allocate(600_000)
    extra = core.allocate(300_000)
    assert not arena_of(core, extra)
    core.allocate(700_000)
    assert core.hits == 2


def test_arena_holes_after_the_last_planned_allocation_serve_many_requests_only() -> None:
    """Few requests may be a log, whose copies stay; many are an evaluation, which ends before the mark."""
    core = Core()
    core.client.load(None, pattern([600_000]))
    for _ in range(2):
        core.step()
        core.free(core.allocate(600_000))
        more = [core.allocate(30_000) for _ in range(12)]
        assert [arena_of(core, address) for address in more] == [False] * 7 + [True] * 5


def test_pinned_buffer_in_an_arena_hole_is_reported() -> None:
    """A kept buffer blocks the plan in every iteration."""
    core = Core()
    core.client.load(None, pattern([600_000, 700_000]))
    core.step()
    core.run([600_000, 700_000])
    more = [core.allocate(1000) for _ in range(7)]
    kept = core.allocate(300_000)  # far behind the last planned one: in a hole
    for number in range(6):
        core.step()
        assert number >= 3 or core.client.pinned_ranges() == []
        core.run([600_000, 700_000])
    ((begin, end),) = core.client.pinned_ranges()
    assert end - begin == 300_000
    assert (begin, end) in core.pool.arena_ranges()
    for address in (kept, *more):
        core.free(address)
    core.step()
    assert core.client.pinned_ranges() == []
    core.give_everything_back()


def test_before_memory_runs_out_holes_in_step_and_memory_of_other_streams_are_used() -> None:
    core = Core(capacity=3 * MIB // 2, page=0)
    core.client.load(None, pattern([600_000, 700_000]))
    core.allocate(600_000)
    assert arena_of(core, core.allocate(690_000))
    core = Core(capacity=1 * MIB, page=0)
    core.pool.set_retained_limit(1 << 30)
    for stream in (1, 2):
        core.free(core.allocate(900_000, stream=stream), stream=stream)
    core.allocate(900_000, stream=3)


def test_unused_plans_are_dropped_before_memory_runs_out() -> None:
    core = Core(capacity=6 * MIB)
    core.client.load(None, pattern([4 * MIB, 1000]))
    core.client.load(None, pattern([2000, 3000]))
    for _ in range(3):
        assert core.run([2000, 3000]) == 2
    kept = core.allocate(2000)
    core.client.enter_dynamic()
    core.allocate(5 * MIB)
    assert len(core.client.patterns()) == 1
    core.free(kept)
    core.give_everything_back()


# --- the arena


def test_smaller_plan_goes_on_where_the_larger_arena_is_refused() -> None:
    core = Core(page=0, capacity=4 * MIB)
    core.client.load(None, pattern([MIB, MIB + 512]))
    core.step()
    assert core.run([MIB, MIB + 512]) == 2
    core.client.install(pattern([5 * MIB, 600]))
    for _ in range(8):
        core.step()
        assert core.run([MIB, MIB + 512]) == 2
    core.give_everything_back()


# --- invalid arguments


def test_invalid_patterns_are_refused() -> None:
    core = Core()
    good = pattern([1000])
    with pytest.raises(ValueError, match="at least one table"):
        core.client.install(_core.Pattern(arena_bytes=0))
    with pytest.raises(ValueError, match="alignment"):
        core.client.install(pattern([1000], [64]))
    with pytest.raises(ValueError, match="cyclic"):
        core.client.install(pattern([1000], cyclic=False))
    with pytest.raises(ValueError, match="cyclic"):
        core.client.load(good, good)
    assert core.client.patterns() == []
    huge = _core.Pattern(arena_bytes=(1 << 64) - 1)
    huge.add_table(sequence=0, stream=0, sizes=np.array([1000]), offsets=np.array([[0]]))
    core.client.install(huge)
    core.step()
    core.step()
    assert core.run([1000]) == 0
    assert not core.client.state()["replaying"]


def test_double_and_foreign_frees_are_distinguished() -> None:
    core = Core()
    core.pool.set_retained_limit(1 << 30)
    core.client.load(None, pattern([1000]))
    for number, size in enumerate([1000, 300, 5000, MIB], 1):
        address = core.allocate(size)
        core.free(address)
        assert not core.client.free(address)
        assert core.client.stats()["double_frees"] == number
    assert not core.client.free(0)
    assert not core.client.free(12345)
    assert core.client.stats()["foreign_frees"] == 2


# --- small allocations


@pytest.mark.parametrize("alignment", [1, 64, 128, 512, 1024, 4096, 8192, 16384])
def test_addresses_inside_a_small_buffer_are_not_freed(alignment: int) -> None:
    """Each size class is tried, at each position in a page."""
    page, unit = 16 << 10, max(alignment, 64)
    pool = _core.Pool(device=_core.SimulatedDevice(alignment=alignment), small_bytes=page)
    client = _core.Client(pool, "test")
    for size in range(unit, min(16 * unit, page) + 1, unit):
        live = [client.allocate(size) for _ in range(page // size + 1)]  # one is in the next page
        behind = live[0] // page * page + page // size * size  # the rest of a page, or an unused page
        assert behind in live or not client.free(behind)
        for address in live:
            inside = {1, size // 2, size - 1, size - unit} - {0}
            assert not any(client.free(address + within) for within in inside)
            assert client.free(address)
            assert not client.free(address)
    stats = client.stats()
    assert stats["small"]["total"] == stats["blocks"]["total"] > 0 == stats["blocks"]["current"]


# --- statistics and recording


def test_small_request_is_served_from_any_free_memory() -> None:
    """Even from an arena hole before out of memory; the request still counts as small."""
    core = Core(page=0, capacity=4 << 20, large=1 << 20)
    core.client.load(None, pattern([3 << 20]))
    core.step()
    address = core.allocate(3 << 20)
    core.free(address)
    taken = [core.allocate(900 << 10)]
    small = [core.allocate(100) for _ in range(3)]
    assert core.client.stats()["small"]["current"] == 3
    for each in small:
        core.free(each)
    assert core.client.stats()["small"]["current"] == 0
    assert core.client.stats()["small_live"]["current"] == 0
    core.free(taken[0])


# --- bounds


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_pages_given_back_between_live_buffers_do_not_become_mappings() -> None:
    pool = _core.Pool(device=_core.HostDevice())
    client = _core.Client(pool, "test")
    buffers = [client.allocate(4096) for _ in range(20_000)]
    before, reserved = mappings(), pool.stats()["reserved"]["current"]
    for buffer in buffers[::2]:
        client.free(buffer)
    pool.trim()
    assert pool.stats()["reserved"]["current"] < 0.6 * reserved
    assert mappings() - before < 500
    again = [client.allocate(4096) for _ in range(10_000)]
    for buffer in buffers[1::2] + again:
        assert client.free(buffer)


def test_hole_is_found_again_after_a_release_and_below_a_higher_limit() -> None:
    guard = _core.Occupancy()
    guard.take(0, 512)
    guard.take(512, 1024)
    assert [guard.find_hole(size, 64, 1024) for size in (256, 512, 128)] == [1024] * 3
    assert guard.find_hole(256, 64, 2048) == 1024
    assert guard.find_hole(256, 64, 1024) == 1024
    guard.release(512)
    assert guard.find_hole(256, 64, 1024) == 512


def test_hole_search_is_bounded_and_resumes_where_the_last_search_stopped() -> None:
    """A search looks at a bounded number of ranges, and wraps around at the end."""
    guard = _core.Occupancy()
    for begin in range(0, 1 << 20, 256):
        guard.take(begin, begin + 192)
    limit = 1 << 20
    found = set()
    for _ in range(200):
        begin = guard.find_hole(64, 64, limit - 64)
        if begin == limit - 64:
            continue
        assert guard.is_free(begin, begin + 64)
        found.add(begin)
    assert len(found) >= 8
    guard.release(512 * 256)
    assert any(guard.find_hole(200, 64, limit - 64) == 512 * 256 - 64 for _ in range(64))
