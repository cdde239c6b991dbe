"""Arena neighbours: plans of several pools on one memory whose buffers are alive together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import sequences
from fake_cuda import FakeCuda
from pools import pattern_of, simulated
from programs import Watched, layers

from mempool import Pool
from mempool.planning.planned_pattern import make_plan, with_pinned
from solvers import lower_bound
from traces import workload
from traces.iterations.pattern import find_patterns

MIB = 1 << 20
BATCHES = (200_000, 100_000, 50_000)


@pytest.fixture
def pools() -> Iterator[tuple[Pool, Pool]]:
    with (
        Pool(simulated(64 * MIB), name="one", background=False) as one,
        Pool(name="other", share=one, background=False) as other,
    ):
        yield one, other


def together(one: Watched, other: Watched, scale: int = 1024, batches: int = 1) -> None:
    """Run an iteration of one pool while the other's batches are alive; then plan."""
    other.pool.step()
    kept = [other.allocate(batches * size) for size in BATCHES]
    one.pool.step()
    layers(one, 10, scale)
    for address in kept:
        other.free(address)
    for memory in (one, other):
        memory.pool.plan_now()


def arena(pool: Pool) -> int:
    return int(pool.core.stats()["arena_bytes"])


@pytest.mark.parametrize("count", [500, 2500])
def test_pinned_range_beyond_the_arena_does_not_enlarge_the_plan(count: int) -> None:
    pattern = pattern_of(workload.buffers(count))
    alone = make_plan(pattern, alignment=64)
    assert alone is not None
    need = alone.plan.arena_bytes
    for low, high in ((1.02, 2), (2.5, 4), (7, 9)):
        around = [(int(low * need) // 512 * 512, int(high * need) // 512 * 512)]
        planned = make_plan(pattern, alignment=64, around=around)
        assert planned is not None
        assert planned.plan.arena_bytes <= 1.02 * need
    beyond = make_plan(pattern, alignment=64, around=[(0, need // 2), (need, need + 1000)])
    assert beyond is not None
    assert beyond.plan.arena_bytes <= 2.02 * need


@pytest.mark.parametrize("network", sequences.NETWORKS)
def test_plan_around_pinned_ranges_is_within_two_percent_of_the_bound(network: str) -> None:
    [pattern] = find_patterns(sequences.scaled(network, 100 * MIB, [1.0] * 4, marks=True))
    draw, beyond = random.Random(network), list[float]()
    for _ in range(5):
        around, at = list[tuple[int, int]](), 0
        for size in draw.choices(pattern.buffers.size.tolist(), k=3):
            begin = at + draw.randrange(8 * MIB) // 64 * 64
            around.append((begin, begin + min(size, 4 * MIB)))
            at = begin + -(-size // 64) * 64
        planned = make_plan(pattern, alignment=64, around=around)
        assert planned is not None
        beyond.append(planned.plan.arena_bytes / lower_bound(with_pinned(planned.buffers, around)))
    assert sum(beyond) / len(beyond) <= 1.02


class Three:
    """Three frameworks on one memory, alive together: solver state, batches, and layers."""

    def __init__(self, pools: tuple[Pool, Pool, Pool]) -> None:
        self.pools = pools
        self.solver, self.batches, self.layers = (Watched(pool) for pool in pools)

    def iteration(self, scale: tuple[float, float, float]) -> None:
        kept = []
        for which, sizes, by in ((self.solver, (60, 90), scale[2]), (self.batches, (200, 100, 50), scale[1])):
            which.pool.step()
            kept += [(which, which.allocate(int(1000 * by * size))) for size in sizes]
        self.layers.pool.step()
        layers(self.layers, 10, int(1024 * scale[0]))
        for which, address in kept:
            which.free(address)
        for pool in self.pools:
            pool.plan_now()

    def phase(self, scale: tuple[float, float, float]) -> float:
        """Run until the former phase has settled; return reserved bytes over the bytes alive at the end."""
        for round_ in range(73):
            self.iteration(scale)
            for pool in self.pools if round_ >= 60 else ():
                pool.client.retire_unused_patterns()  # as each second
        for pool in self.pools:
            pool.client.reset_peaks()
        self.iteration(scale)
        alive = sum(pool.client.stats()["live"]["peak"] for pool in self.pools)
        return self.pools[0].core.stats()["reserved"]["current"] / alive


def test_neighbouring_plans_move_closer_when_others_shrink_or_vanish() -> None:
    with (
        Pool(simulated(), name="solver", background=False) as solver,
        Pool(name="batches", share=solver, background=False) as batches,
        Pool(name="layers", share=solver, background=False) as third,
    ):
        program = Three((solver, batches, third))
        for scale in ((1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 4), (0.6, 0.7, 0.55), (3, 2, 1), (1, 1, 1)):
            assert program.phase(scale) < 1.15, scale


def test_plan_dropped_by_the_core_stays_dropped(pools: tuple[Pool, Pool]) -> None:
    """A plan dropped when memory was short gets no arena again because of changes in other pools."""
    one, other = pools
    memory, others = Watched(one), Watched(other)
    for scale in (300_000, 40_000):
        for _ in range(40):
            together(memory, others, scale, batches=8)
    assert len(one.client.patterns()) == 2
    one.free(one.allocate(57 * MIB))
    assert len(one.client.patterns()) == 1
    one.trim()
    for _ in range(5):
        together(memory, others, 40_000, batches=8)
    other.close()
    for _ in range(30):
        one.step()
        layers(memory, 10, 40_000)
        one.plan_now()
        one.client.retire_unused_patterns()
    assert len(one.client.patterns()) == 1
    assert arena(one) <= 1.1 * memory.peak / 7  # the large layers' share


@pytest.mark.parametrize("memory", ["plain", "managed", "growing"])
def test_plans_take_effect_at_a_moment_without_live_buffers(fake: FakeCuda, memory: str) -> None:
    """At a boundary of the pool with the smaller arena there are no live buffers."""
    fake.set_capacity((60 if memory == "managed" else 1000) * MIB)
    with (
        Pool(fake.device(memory=memory), name="work", background=False) as work,
        Pool(share=work, name="batches", background=False) as batches,
    ):

        def iteration() -> None:
            batches.step()
            kept = [batches.allocate(size * MIB) for size in (20, 10, 5)]
            work.step()
            layers = [work.allocate(4 * MIB * (i % 3 + 1)) for i in range(6)]
            for address in (*reversed(layers), *kept):
                (work if address in layers else batches).free(address)
            for pool in (work, batches):
                pool.plan_now()

        def misses() -> list[int]:
            return [pool.report().to_dict()["misses_total"] for pool in (work, batches)]

        for _ in range(100):
            iteration()
        before = misses()
        for _ in range(20):
            iteration()
        assert misses() == before
        assert arena(work) == 84 * MIB


def test_replans_after_layout_changes_avoid_pinned_ranges(pools: tuple[Pool, Pool]) -> None:
    one, other = pools
    memory, others = Watched(one), Watched(other)
    stays: list[Any] = []
    for number in range(60):
        together(memory, others)
        if number == 20:
            one.step()
            stays += [memory.allocate(1024 * (layer % 5 + 1)) for layer in range(3)]
    for _ in range(60):
        together(memory, others)
    before = int(one.client.stats()["outcomes"]["slot_occupied"])
    for _ in range(3):
        other.client.drop_patterns()
        one.plan_now()
        for _ in range(4):
            one.step()
            layers(memory, 10)
            one.plan_now()
    assert int(one.client.stats()["outcomes"]["slot_occupied"]) == before
    for address in stays:
        memory.free(address)
