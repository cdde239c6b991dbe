"""Several pools share memory: freed memory serves all pools, and no pool disturbs another's plan."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cores import pattern
from pools import run, simulated
from programs import Watched, layers

import mempool.numpy
from mempool import OutOfMemoryError, Pool, UsageError, _core
from mempool.settings import NEVER

MIB = 1 << 20


@pytest.fixture
def pools() -> Iterator[tuple[Pool, Pool]]:
    with (
        Pool(simulated(), name="one", background=False) as one,
        Pool(name="other", share=one, background=False) as other,
    ):
        yield one, other


def take_turns(one: Pool, other: Pool, count: int = 14) -> tuple[Watched, Watched]:
    memory, others = Watched(one), Watched(other)
    for _ in range(count):
        for which in (memory, others):
            which.pool.step()
            layers(which, 10 if which is memory else 7)
            which.pool.plan_now()
    return memory, others


def test_memory_freed_by_a_pool_serves_the_other_pool(pools: tuple[Pool, Pool]) -> None:
    one, other = pools
    address = one.allocate(MIB)
    reserved = one.core.stats()["reserved"]["current"]
    one.free(address)
    assert other.allocate(MIB) == address
    assert one.core.stats()["reserved"]["current"] == reserved
    other.free(address)


def test_two_pools_replay_their_plans_in_a_shared_arena(pools: tuple[Pool, Pool]) -> None:
    one, other = pools
    take_turns(one, other)
    for pool in pools:
        report = pool.report().to_dict()
        assert (report["state"], report["hit_rate"], report["plans"]) == ("replaying", 1.0, 1)
    assert one.planned is not None
    assert other.planned is not None
    assert one.planned.plan.arena_bytes != other.planned.plan.arena_bytes
    arena = one.core.stats()["arena_bytes"]
    largest = max(one.planned.plan.arena_bytes, other.planned.plan.arena_bytes)
    assert largest <= arena < largest + one.device.page


def test_counts_are_of_each_and_memory_is_of_both(pools: tuple[Pool, Pool]) -> None:
    one, other = pools
    kept = one.allocate(MIB), other.allocate(2 * MIB)
    mine, its = one.report().to_dict(), other.report().to_dict()
    assert (mine["requested_bytes"], its["requested_bytes"]) == (MIB, 2 * MIB)
    assert mine["reserved_bytes"] == its["reserved_bytes"] >= 3 * MIB
    assert (mine["shared_with"], its["shared_with"]) == (["other"], ["one"])
    assert "shared with  " in str(one.report())
    for pool, address in zip(pools, kept, strict=True):
        pool.free(address)


def test_out_of_memory_error_counts_the_live_bytes_of_both_pools() -> None:
    with (
        Pool(simulated(4 * MIB), background=False) as one,
        Pool(share=one, background=False) as other,
    ):
        address = one.allocate(3 * MIB)
        with pytest.raises(OutOfMemoryError) as told:
            other.allocate(2 * MIB)
        assert told.value.live_bytes == 3 * MIB
        one.free(address)
        other.free(other.allocate(2 * MIB))


def alive(pool: Pool) -> tuple[int, int, int]:
    stats = pool.client.stats()
    return tuple(stats[key]["current"] for key in ("blocks", "requested", "live"))


def test_buffers_of_a_collected_client_are_counted_by_no_pool(pools: tuple[Pool, Pool]) -> None:
    one, _ = pools
    gc.freeze()  # collections skip the objects of other tests
    try:
        for _ in range(300):  # more than the number of handles
            gone = Pool(share=one, background=False)
            address = gone.allocate(4096)
            gone.close()
            del gone
            gc.collect()
            one.free(address)
            assert alive(one) == (0, 0, 0)
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_reserved": "1GiB"}, "max_reserved is 1073741824, and None in the pool to share"),
        ({"small_bytes": 64}, "small_bytes is 64, and 512"),
        ({"wait_bytes": "never"}, "streams share memory after an event"),
        ({"check": True}, "shares with nobody"),
        ({"device": "host"}, "has another device"),
        pytest.param({"device": _core.HostDevice()}, "has another device", id="device object"),
    ],
    ids=str,
)
def test_memory_options_are_decided_by_the_first_pool(options: dict[str, Any], why: str) -> None:
    with Pool(simulated(), background=False) as one, pytest.raises(UsageError, match=why):
        Pool(share=one, background=False, **options)


def test_pool_without_stream_sharing_passes_its_setting_on_to_every_sharing_pool() -> None:
    with Pool(simulated(), wait_bytes="never", background=False) as one:
        with Pool(share=one, background=False) as other:
            assert not other.shares_streams
            assert other.settings.wait_bytes == NEVER
        with pytest.raises(UsageError, match="streams share nothing"):
            Pool(share=one, wait_bytes=0, background=False)


def test_sharing_with_a_closed_pool_or_a_non_pool_is_refused() -> None:
    with Pool(background=False) as closed:
        pass
    with pytest.raises(UsageError, match="is closed"):
        Pool(share=closed)
    with pytest.raises(UsageError, match="not a pool"):
        Pool(share=closed.core)  # type: ignore[arg-type]
    with Pool(check=True, background=False) as checked, pytest.raises(UsageError, match="redzones"):
        Pool(share=checked)


@pytest.mark.parametrize("first", [0, 1])
def test_closing_a_pool_leaves_the_other_pool_replaying(pools: tuple[Pool, Pool], first: int) -> None:
    memory, others = take_turns(*pools)
    closed, goes_on = (memory, others) if first == 0 else (others, memory)
    kept = closed.allocate(MIB)
    closed.pool.close()
    hits = goes_on.pool.report().to_dict()["hits_total"]
    goes_on.pool.step()
    layers(goes_on, 10 if goes_on is memory else 7)
    assert goes_on.pool.report().to_dict()["hit_rate"] == 1.0
    assert goes_on.pool.report().to_dict()["hits_total"] > hits
    closed.free(kept)


def test_memory_lives_while_either_pool_does() -> None:
    device = simulated()
    one = Pool(device, background=False)
    other = Pool(share=one, background=False)
    address = other.allocate(MIB)
    one.close()
    del one
    gc.collect()
    other.free(address)
    other.free(other.allocate(MIB))
    other.close()
    del other
    gc.collect()
    assert device.counts().live_reservations == 0


def test_closed_pool_keeps_no_arena_and_no_free_memory_for_its_plans(pools: tuple[Pool, Pool]) -> None:
    one, other = pools
    take_turns(one, other)
    assert one.planned is not None
    assert other.planned is not None
    small = min(one.planned.plan.arena_bytes, other.planned.plan.arena_bytes)
    large = one if one.planned.plan.arena_bytes > small else other
    large.close()
    page = one.device.page
    assert one.core.stats()["arena_bytes"] == -(-small // page) * page


def test_allocations_of_a_pool_avoid_arena_holes_about_to_be_used_by_the_other() -> None:
    with Pool(simulated(), background=False) as one, Pool(share=one, background=False) as other:
        sizes = [64 << 10] * 4
        one.client.load(None, pattern(sizes))
        first = one.allocate(sizes[0])
        kept = other.allocate(64 << 10)
        rest = [one.allocate(size) for size in sizes[1:]]
        assert one.client.stats()["outcomes"]["hit"] == 4
        for address in (first, *rest):
            one.free(address)
        other.free(kept)


def test_idle_arena_of_a_pool_serves_the_other_pool_between_iterations() -> None:
    with Pool(simulated(), background=False) as one, Pool(share=one, background=False) as other:
        sizes = [64 << 10] * 4
        one.client.load(None, pattern(sizes))
        planned = [one.allocate(size) for size in sizes]
        for address in planned:
            one.free(address)
        address = other.allocate(64 << 10)
        assert address in planned
        other.free(address)


def test_trim_by_an_idle_pool_leaves_the_arena_to_the_active_pool(
    pools: tuple[Pool, Pool],
) -> None:
    one, other = pools
    memory = Watched(one)
    run(one, lambda _: layers(memory), 8, marks=True)
    assert one.state == "replaying"
    before = one.report().to_dict()
    for _ in range(4):
        other.trim()
        assert one.core.stats()["arena_bytes"] == before["arena_bytes"]
        one.step()
        layers(memory)
    assert one.report().to_dict()["misses_total"] == before["misses_total"]
    assert one.core.stats()["arena_bytes"] == before["arena_bytes"]
    other.trim()
    other.trim()
    assert one.core.stats()["arena_bytes"] == 0


def test_forced_release_of_the_arena_costs_the_other_pool_no_misses(pools: tuple[Pool, Pool]) -> None:
    one, other = pools
    memory, _ = take_turns(one, other)
    before = one.report().to_dict()["misses_total"]
    assert other.release()
    assert (one.state, other.state) == ("armed", "armed")
    layers(memory, 10)  # the rest of its iteration
    one.step()
    layers(memory, 10)
    assert one.state == "replaying"
    assert one.report().to_dict()["misses_total"] == before


def test_memory_used_in_each_iteration_of_a_slow_pool_is_not_idle_to_a_fast_pool(
    pools: tuple[Pool, Pool],
) -> None:
    """Idle memory is returned after two iterations: of the slow pool here."""
    one, other = pools
    for pool in pools:
        pool.client.set_retained_limit(1 << 40)
        pool.client.load(None, pattern([4096]))
    calls = 0
    for _ in range(6):
        other.step()
        other.free(other.allocate(4096))
        other.free(other.allocate(2 * MIB))  # off the plan
        for _ in range(5):
            one.step()
            one.free(one.allocate(4096))
        calls = calls or one.core.stats()["device_calls"]
    assert one.core.stats()["device_calls"] == calls


def test_plan_from_a_file_takes_effect_once_another_pool_chooses_the_device(fake: Any) -> None:
    device = fake.device(None)
    with Pool(device, background=False) as one, Pool(share=one, background=False) as other:
        other.client.load(None, pattern([4096, 8192]))
        assert device.bind(0)
        one.client.device_is_bound()
        kept = [other.allocate(size) for size in (4096, 8192)]
        assert other.client.stats()["outcomes"]["hit"] == 2
        for address in kept:
            other.free(address)


def test_arrays_of_a_former_pool_are_counted_by_the_next_on_the_same_memory() -> None:
    with Pool(name="all", background=False) as memory:
        with mempool.numpy.install(share=memory, background=False) as former:
            array = np.ones(1 << 20, np.uint8)
            assert former.report().to_dict()["requested_bytes"] >= 1 << 20
        with mempool.numpy.install(share=memory, background=False) as pool:
            requested = pool.report().to_dict()["requested_bytes"]
            assert requested >= 1 << 20
            del array
            assert 0 <= pool.report().to_dict()["requested_bytes"] <= requested - (1 << 20)


def test_only_the_last_of_successive_pools_is_held_for_living_arrays() -> None:
    with Pool(name="all", background=False) as memory:
        held = _core.numpy_hook().held()
        array = np.empty(0)
        for _ in range(4):
            with mempool.numpy.install(share=memory, background=False):
                array = np.ones(1 << 20, np.uint8)
        gc.collect()
        assert _core.numpy_hook().held() == held + 1
        assert int(array.sum()) == 1 << 20


def test_request_in_flight_while_pools_change_hands_keeps_the_memory_of_arrays() -> None:
    """Equal counts of allocations and frees do not prove that nothing lives."""
    memory = Pool(name="all", background=False)
    with mempool.numpy.install(share=memory, background=False) as former:
        array = np.full(1 << 20, 7, np.uint8)
    with mempool.numpy.install(share=memory, background=False) as pool:
        late = [former.client.allocate(4096) for _ in range(pool.client.stats()["blocks"]["current"])]
        for address in late:
            assert pool.client.free(address)
        assert pool.client.stats()["blocks"]["current"] == 0
    memory.close()
    del memory, former, pool
    gc.collect()
    assert _core.numpy_hook().held() > 0
    assert int(array.sum()) == 7 << 20
    del array
