"""Unavailable arenas: low cost, no effect on other plans, and acquisition once memory suffices."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import pytest
from cores import pattern
from pools import simulated

from mempool import Pool, _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fake_cuda import FakeCuda

MIB = 1 << 20
LARGE, SMALL = [40 * MIB] * 6, [12 * MIB] * 3
MEMORY_CALLS = ("cuMemAlloc_v2", "cuMemFree_v2", "cuMemCreate", "cuMemUnmap", "cuCtxSynchronize")


def iterations(pool: Pool, sizes: list[int], count: int) -> None:
    for _ in range(count):
        pool.step()
        for address in [pool.allocate(size) for size in sizes]:
            pool.free(address)


def learn(pool: Pool, sizes: list[int]) -> None:
    for _ in range(8):
        iterations(pool, sizes, 1)
        pool.plan_now()
    assert pool.state == "replaying"


def calls(fake: FakeCuda) -> list[int]:
    return [fake.calls(name) for name in MEMORY_CALLS]


def hits(pool: Pool) -> int:
    return int(pool.report().to_dict()["hits_total"])


@pytest.mark.parametrize("memory", ["plain", "growing"])
def test_arena_larger_than_free_memory_is_not_tried(fake: FakeCuda, memory: str) -> None:
    with Pool(fake.device(memory=memory), background=False) as pool:
        learn(pool, LARGE)
        pool.release()
        fake.set_capacity(200 * MIB)
        iterations(pool, LARGE[:4], 20)
        before, looks = calls(fake), fake.calls("cuMemGetInfo_v2")
        iterations(pool, LARGE[:4], 1000)
        assert calls(fake) == before
        assert fake.calls("cuMemGetInfo_v2") - looks <= 1000 // 64 + 1
        fake.set_capacity(1000 * MIB)
        iterations(pool, LARGE, 66)
        before_hits = hits(pool)
        iterations(pool, LARGE, 10)
        assert hits(pool) == before_hits + 60


@contextlib.contextmanager
def refused_by_the_device() -> Iterator[tuple[Pool, _core.SimulatedDevice, Callable[[], None]]]:
    """Yield a pool whose arena the device refuses, the device, and a function that makes room."""
    device = simulated(300 * MIB, page=0)
    with Pool(device, background=False) as pool:
        pool.client.load(None, pattern(LARGE))
        kept = pool.allocate(60 * MIB)
        pool.release()
        hog = pool.allocate(61 * MIB)

        def make_room() -> None:
            pool.free(hog)
            pool.free(kept)

        yield pool, device, make_room


def test_arena_of_unknown_availability_is_tried_ever_more_rarely() -> None:
    with refused_by_the_device() as (pool, device, make_room):
        iterations(pool, [4096], 1000)
        assert 5 <= device.counts().refusals <= 10
        make_room()
        iterations(pool, LARGE, 1100)
        assert pool.state == "replaying"


def test_program_similar_to_an_unavailable_plan_is_planned(fake: FakeCuda) -> None:
    """A small difference usually needs no new plan: the former plan would serve it."""
    with Pool(fake.device(), background=False) as pool:
        learn(pool, LARGE)
        pool.release()
        fake.set_capacity(200 * MIB)
        learn(pool, LARGE[:4])
        assert pool.core.stats()["arena_bytes"] == 160 * MIB


@pytest.mark.parametrize("memory", ["plain", "growing"])
def test_too_large_plan_takes_nothing_from_another_client(fake: FakeCuda, memory: str) -> None:
    with (
        Pool(fake.device(memory=memory), background=False) as one,
        Pool(share=one, background=False) as other,
    ):
        for _ in range(8):
            for pool, sizes in ((one, SMALL), (other, LARGE)):
                iterations(pool, sizes, 1)
                pool.plan_now()
        assert (one.state, other.state) == ("replaying", "replaying")
        other.release()
        fake.set_capacity(200 * MIB)
        for _ in range(5):
            iterations(one, SMALL, 1)
            iterations(other, LARGE[:4], 1)
        before, before_hits = calls(fake), hits(one)
        for _ in range(400):
            iterations(one, SMALL, 1)
            iterations(other, LARGE[:4], 1)
        assert calls(fake) == before
        assert hits(one) == before_hits + 1200
        fake.set_capacity(1000 * MIB)
        for _ in range(66):
            iterations(one, SMALL, 1)
            iterations(other, LARGE, 1)
        assert (one.state, other.state) == ("replaying", "replaying")


def refused_beside(one: Pool, other: Pool) -> None:
    """Two pools that need a larger arena while a buffer of one stays in the present arena for good."""
    kept: dict[Pool, int] = {}

    def iteration(pool: Pool, keeps: int, sizes: list[int]) -> None:
        pool.step()
        fresh = pool.allocate(keeps)
        if pool in kept:
            pool.free(kept[pool])
        kept[pool] = fresh
        for address in [pool.allocate(size) for size in sizes]:
            pool.free(address)
        pool.plan_now()

    for _ in range(20):
        iteration(one, 12 * MIB, [11 * MIB] * 3)
    one.step()
    for_good = one.allocate(12 * MIB)
    for _ in range(30):
        iteration(one, 12 * MIB, [11 * MIB] * 3)
        iteration(other, 14 * MIB, [30 * MIB] * 3)
    for pool, address in [*kept.items(), (one, for_good)]:
        pool.free(address)


def test_reported_reason_for_a_missing_arena_is_the_actual_reason(
    fake: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Pool(fake.device(), background=False) as one,
        Pool(share=one, background=False) as other,
        Pool(share=one, background=False) as without,
        caplog.at_level(logging.WARNING, "mempool"),
    ):
        refused_beside(one, other)
        for pool in (one, other, without):
            pool.planner.run_once(0.0)
        assert len(caplog.messages) == 2
        assert all("buffers are alive in the present arena" in line for line in caplog.messages)
        assert 'memory="growing"' in caplog.text
        assert "free of" not in caplog.text
        assert "buffers are alive in the present arena" in other.explain()


def test_shortage_of_memory_is_reported_once(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    with Pool(fake.device(), background=False) as pool, caplog.at_level(logging.WARNING, "mempool"):
        learn(pool, LARGE)
        pool.release()
        fake.set_capacity(200 * MIB)
        iterations(pool, LARGE[:4], 1)
        assert "no memory for its arena: there is too little memory" in pool.explain()
        for _ in range(3):
            iterations(pool, LARGE[:4], 10)
            pool.planner.run_once(0.0)
        told = [line for line in caplog.messages if "cannot be had" in line]
        assert len(told) == 1
        assert "an arena of 240 MiB cannot be had" in told[0]
        assert "which has 40 MiB free of 200 MiB" in told[0]
        assert "raise max_reserved" in told[0]
