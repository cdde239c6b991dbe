"""Budget for the reserved memory of a pool: idle memory is returned first, and excess is counted."""

from __future__ import annotations

import pytest
from cores import Core, pattern
from hypothesis import given, settings
from hypothesis import strategies as st

KIB, MIB, PAGE = 1 << 10, 1 << 20, 4096
NONE = (1 << 64) - 1


def reserved(core: Core) -> int:
    return int(core.pool.stats()["reserved"]["current"])


def beyond(core: Core) -> int:
    return int(core.pool.stats()["beyond_budget"])


def kept(core: Core) -> Core:
    """Retain free memory until requested."""
    core.client.set_retained_limit(NONE)
    return core


@pytest.mark.parametrize("page", [PAGE, 0])
def test_idle_memory_is_returned_before_more_is_reserved_the_oldest_first(page: int) -> None:
    core = kept(Core(page=page, large=64 * KIB))
    core.pool.set_budget(3 * MIB // 2)
    old, new = core.allocate(MIB), core.allocate(MIB // 2)
    core.free(old)
    core.free(new)
    assert reserved(core) == 3 * MIB // 2
    core.allocate(3 * MIB // 4)  # fits no free range
    assert reserved(core) == 5 * MIB // 4
    assert core.allocate(MIB // 2) == new  # still free
    assert beyond(core) == 0


@pytest.mark.parametrize("page", [PAGE, 0])
def test_allocation_without_room_exceeds_the_budget_and_is_counted(page: int) -> None:
    core = kept(Core(page=page, large=64 * KIB))
    core.pool.set_budget(MIB)
    core.allocate(MIB)
    assert core.pool.room() <= 0
    core.allocate(MIB)
    assert beyond(core) == 1
    assert core.pool.stats()["recent_reserved_bytes"] == 2 * MIB
    core.pool.set_budget(NONE)
    core.allocate(MIB)
    assert beyond(core) == 1


@settings(max_examples=60)
@given(st.data(), st.sampled_from([PAGE, 0]))
def test_allocation_within_the_reported_room_never_exceeds_the_budget(data: st.DataObject, page: int) -> None:
    """Small, shared and large blocks, frees in any order, with or without an arena."""
    core = kept(Core(page=page, large=64 * KIB, shared=256 * KIB))
    core.pool.set_budget(MIB)
    if data.draw(st.booleans()):
        core.client.load(None, pattern([100 * KIB, 50 * KIB]))
    for _ in range(data.draw(st.integers(1, 40))):
        if core.live and data.draw(st.booleans()):
            core.free(data.draw(st.sampled_from(sorted(core.live))))
            continue
        size = data.draw(st.sampled_from([700, 3000, 5000, 30 * KIB, 100 * KIB, 300 * KIB]))
        room, before = core.pool.room(), beyond(core)
        core.allocate(size)
        if -(-size // 512) * 512 <= room:
            assert beyond(core) == before
            assert reserved(core) <= MIB


def with_arena() -> Core:
    """A core with an arena of a MiB, without live buffers."""
    core = kept(Core(large=64 * KIB))
    core.client.load(None, pattern([MIB // 2, MIB // 2]))
    core.step()
    assert core.run([MIB // 2, MIB // 2]) == 2
    assert reserved(core) == MIB
    return core


def test_persistent_buffer_goes_beside_the_arena_or_into_a_hole_within_the_budget() -> None:
    core = with_arena()
    core.pool.set_budget(3 * MIB // 2)
    beside = core.allocate(300 * KIB)
    assert core.pool.arena_ranges() == []
    inside = core.allocate(300 * KIB)
    assert len(core.pool.arena_ranges()) == 1
    assert beyond(core) == 0
    for address in (beside, inside):
        core.free(address)


def test_arena_beyond_the_budget_waits_for_room() -> None:
    core = kept(Core(large=64 * KIB))
    core.pool.set_budget(3 * MIB // 2)
    stays, leaves = core.allocate(MIB // 4), core.allocate(MIB // 2)
    core.client.install(pattern([MIB, 1024]), 3)
    core.step()
    assert core.client.state()["refusal"] == "limit"
    assert not core.client.request_arena()
    core.free(leaves)
    for _ in range(8):  # the pool does not request the arena at every boundary
        core.step()
    assert core.client.request_arena()
    assert core.client.state()["refusal"] == ""
    assert reserved(core) == 5 * MIB // 4 + PAGE
    assert core.run([MIB, 1024]) == 2
    core.free(stays)
    assert beyond(core) == 0


def test_arena_is_taken_automatically_while_permitted_and_within_the_budget() -> None:
    core = kept(Core(large=64 * KIB))
    core.pool.set_budget(3 * MIB // 2)
    core.client.install(pattern([MIB // 2]), 3)
    core.step()
    assert core.pool.stats()["arena_bytes"] == 0
    core.client.set_arena_allowed(True)  # whatever was refused before
    core.step()
    assert core.pool.stats()["arena_bytes"] == MIB // 2
    assert core.client.request_arena()  # which changes nothing of it
    core.client.install(pattern([MIB]), 4)
    core.step()
    assert core.pool.stats()["arena_bytes"] == MIB
    core.client.set_arena_allowed(False)
    core.client.install(pattern([5 * MIB // 4]), 5)
    core.step()
    assert core.pool.stats()["arena_bytes"] == MIB
    core.client.set_arena_allowed(True)
    core.client.install(pattern([2 * MIB]), 6)
    core.step()
    assert core.pool.stats()["arena_bytes"] == 5 * MIB // 4
    assert beyond(core) == 0
