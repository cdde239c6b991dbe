"""The arena's life: acquisition, growth, drain, bypass, conversion to segments, refusal, dormant plans."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from cores import STEP, Core, pattern
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pools import pattern_of, simulated
from sequences import NETWORKS, scaled, varied

from mempool import Pool, _core
from mempool.planning.planned_pattern import make_plan
from mempool.simulate import replaying, simulate
from traces.buffers import Buffers

PAGE, MIB = 4096, 1 << 20
#: No size fits the slot of another position, nor does one an eighth larger.
FEW = [57_600 + 4480 * k for k in range(40)]
LONGEST_PAUSE = 1024  # iterations between two attempts to take an arena
PLANS: dict[str, dict[str, Any]] = {
    "constant": {"sizes": FEW},
    "envelope": {"sizes": FEW, "least": [size - 640 for size in FEW]},
    "short": {"sizes": FEW[:6]},
    "larger": {"sizes": [*FEW, 900_001]},
}


def arena(core: Core) -> int:
    size: int = core.pool.stats()["arena_bytes"]
    return size


def conversions(core: Core) -> int:
    count: int = core.pool.stats()["arena_conversions"]
    return count


def page_bytes(ranges: Iterable[tuple[int, int]]) -> int:
    """Return the bytes of the pages that the (address, size) pairs touch."""
    touched: set[int] = set()
    for address, size in ranges:
        touched.update(range(address // PAGE, (address + size - 1) // PAGE + 1))
    return PAGE * len(touched)


class ArenaMachine(RuleBasedStateMachine):
    """A program of random iterations, on a device with or without pages, near its limit."""

    @initialize(page=st.sampled_from([0, PAGE]), share=st.floats(1.0, 2.5))
    def begin(self, page: int, share: float) -> None:
        self.page, self.limit = page, int(share * (sum(FEW) + 2 * MIB))
        self.core = Core(page=page, limit=self.limit)
        self.sizes, self.gradients = FEW, list[int]()
        self.captured = self.converted = False

    def allocate(self, size: int) -> int:
        """Allocate if the pool can; a refused request did not fit beside the live buffers."""
        before = conversions(self.core)
        address = self.core.client.allocate(size, 0)
        live = self.core.live
        if address == 0:
            fits = page_bytes(live.items()) + size + 2 * PAGE <= self.limit
            assert self.captured or self.page == 0 or not fits
        else:
            assert all(address + size <= a or a + s <= address for a, s in live.items())
            live[address] = size
        if conversions(self.core) > before:
            assert self.page
            assert not self.captured
            self.converted = True
        return address

    @rule(name=st.sampled_from(sorted(PLANS)), low_water=st.sampled_from([0, 3]))
    def install(self, name: str, low_water: int) -> None:
        self.sizes = PLANS[name]["sizes"]
        self.core.client.install(pattern(**PLANS[name], low_water=low_water))

    @rule(times=st.sampled_from([1.0, 1.0, 0.9945, 1.125]), keeps=st.integers(0, 3), count=st.integers(1, 3))
    def iterate(self, times: float, keeps: int, count: int) -> None:
        """Run iterations whose last buffers are freed early in the next, as gradients are."""
        for _ in range(count):
            self.core.step()
            self.converted = False
            addresses = [self.allocate(int(times * size)) for size in self.sizes]
            while self.gradients:
                self.core.free(self.gradients.pop())
            made = [address for address in addresses if address]
            self.gradients = made[len(made) - keeps :]
            for address in made[: len(made) - keeps]:
                self.core.free(address)

    @rule(size=st.integers(600, 2 * MIB))
    def pin(self, size: int) -> None:
        """Allocate a buffer that lives on; a conversion keeps the planned offsets of all live buffers."""
        offsets = {address: self.core.client.planned_offset_of(address) for address in self.core.live}
        before = conversions(self.core)
        self.allocate(size)
        if conversions(self.core) > before:
            assert {a: self.core.client.planned_offset_of(a) for a in offsets} == offsets

    @precondition(lambda self: self.core.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(sorted(self.core.live)))
        self.core.free(address)
        self.gradients = [gradient for gradient in self.gradients if gradient != address]

    @rule(rounds=st.integers(1, 12))
    def make_plans_dormant(self, rounds: int) -> None:
        for _ in range(rounds):
            self.core.client.retire_unused_patterns()

    @rule(force=st.booleans())
    def give_back(self, force: bool) -> None:
        assert self.core.client.give_back(force) == (arena(self.core) == 0)

    @rule()
    def drop_plans(self) -> None:
        self.core.client.drop_patterns()

    @rule()
    def capture(self) -> None:
        """Begin or end the capture of a graph, during which nothing may be given back."""
        if self.captured:
            self.core.pool.end_graph((1, 1))
        else:
            self.core.pool.begin_graph((1, 1), [7])
        self.captured = not self.captured

    @invariant()
    def memory_is_accounted_for(self) -> None:
        core = self.core
        assert core.committed <= self.limit
        assert core.device.counts().errors == 0
        assert core.client.stats()["blocks"]["current"] == len(core.live)
        assert not (self.converted and arena(core))

    def teardown(self) -> None:
        """A plan that fits takes effect again, and all memory goes back."""
        if not hasattr(self, "core"):
            return
        if self.captured:
            self.capture()
        for address in list(self.core.live):
            self.core.free(address)
        self.core.client.install(pattern(FEW))
        assert any(self.all_hit() for _ in range(LONGEST_PAUSE + 8))
        self.core.give_everything_back()

    def all_hit(self) -> bool:
        self.core.step()
        return self.core.run(FEW) == len(FEW)


TestArena = ArenaMachine.TestCase
GIB = 1 << 30
#: Plans of 10, 20 and 66 GiB. The address space for the first has room for the second, and not for the third.
SMALL, MIDDLE, LARGE = [GIB] * 10, [GIB] * 20, [GIB] * 66
#: Calls that cause each event of an arena with a live buffer of 1 GiB at its beginning.
CAUSES: dict[str, Callable[[Core], object]] = {
    "grown": lambda core: core.client.install(pattern(MIDDLE)),
    "shrunk": lambda core: core.client.give_back(force=True),
    "blocked": lambda core: core.client.install(pattern(LARGE)),
    "unblocked": lambda core: (core.client.drop_patterns(), core.step()),
    "released": lambda core: (core.free(next(iter(core.live))), core.client.give_back(force=True)),
    "converted": lambda core: core.allocate(75 * GIB),
}


@pytest.mark.parametrize(("before", "event", "after"), _core.ARENA_TRANSITIONS)
def test_each_transition_of_the_arena_happens_and_is_logged(before: str, event: str, after: str) -> None:
    core = Core(page=2 * MIB, limit=80 * GIB)
    core.client.install(pattern(SMALL))
    core.step()
    core.allocate(GIB)
    if before == "draining":
        CAUSES["blocked"](core)
    if before != "none":
        CAUSES[event](core)
    state, events = (
        "none",
        [entry["reason"] for entry in core.client.decisions() if entry["decision"] == "arena"],
    )
    for each in events:
        state = next(to for start, by, to in _core.ARENA_TRANSITIONS if (start, by) == (state, each))
    assert (events[-1], state) == (event, after)
    assert (arena(core) == 0) == (after == "none")
    core.give_everything_back()


# --- conversion to segments
HALVES = [64 << 10] * 32
WIDE = 300 << 10  # more than any hole


def half_full(**options: int) -> tuple[Core, list[int]]:
    """Return a core within an iteration in which every second buffer is live, and the live buffers."""
    core = Core(**{"limit": 3 * MIB, **options})
    core.client.install(pattern(HALVES))
    core.step()
    assert core.run(HALVES) == len(HALVES)
    core.step()
    addresses = [core.allocate(size) for size in HALVES]
    for address in addresses[::2]:
        core.free(address)
    return core, addresses[1::2]


def test_conversion_backs_off_and_resets_after_a_long_time_in_use() -> None:
    core = Core(limit=3 * MIB)
    core.client.install(pattern(HALVES))

    def iteration(wide: int) -> None:
        core.step()
        for address in [core.allocate(size) for size in HALVES][::2]:
            core.free(address)
        for _ in range(wide):
            core.allocate(WIDE)
        for address in list(core.live):
            core.free(address)

    for _ in range(400):
        iteration(4)
    habit = conversions(core)
    assert 6 <= habit <= 6 + 400 // 64 + 1
    for _ in range(140):
        iteration(0)
    iteration(4)
    assert conversions(core) == habit + 1
    before = core.hits
    iteration(0)
    assert core.hits == before + len(HALVES)


def test_converted_memory_waits_for_other_streams() -> None:
    """Uses by other streams, and frees by others than the buffer's own."""
    core, live = half_full()
    for _ in range(4):
        core.allocate(WIDE)
    assert conversions(core) == 1
    for address in live[:4]:
        core.client.use(address, 1)
        core.free(address)
    for address in live[4:8]:
        core.free(address, 1)
    assert core.pool.stats()["deferred"]["current"] == 8 * HALVES[0]
    for address in live[8:]:
        core.free(address)
    assert not {core.allocate(HALVES[0]) for _ in range(8)} & set(live[:8])
    core.device.finish(1)
    core.give_everything_back()


def test_dropped_plans_leave_no_planned_offsets() -> None:
    core, live = half_full()
    for _ in range(4):
        core.allocate(WIDE)
    assert all(core.client.planned_offset_of(one) is not None for one in live)
    core.client.drop_patterns()
    assert not any(core.client.planned_offset_of(one) is not None for one in live)


def test_each_client_counts_its_own_buffers_after_conversion() -> None:
    core, live = half_full()
    first, core.client = core.client, _core.Client(core.pool, "second")
    for _ in range(4):
        core.allocate(WIDE)
    assert conversions(core) == 1
    for address in live:
        del core.live[address]
        assert core.client.free(address, 0)
    assert first.stats()["live"]["current"] == 0
    assert core.client.stats()["blocks"]["current"] == 4


def test_live_buffers_keep_their_contents_through_conversion() -> None:
    pool = _core.Pool(device=_core.HostDevice(), max_reserved=256 << 20)
    client = _core.Client(pool, "test")
    sizes = [4 << 20] * 40
    client.install(pattern(sizes))
    client.mark(STEP)
    addresses = [client.allocate(size, 0) for size in sizes]
    for number, address in enumerate(addresses):
        ctypes.memset(address, number, sizes[0])
    for address in addresses[::2]:
        assert client.free(address, 0)
    more = [client.allocate(9 << 20, 0) for _ in range(18)]
    assert all(more)
    assert pool.stats()["arena_conversions"] == 1
    for address in more:
        ctypes.memset(address, 255, 9 << 20)
    for number, address in enumerate(addresses):
        assert number % 2 == 0 or ctypes.string_at(address, sizes[0]) == bytes([number]) * sizes[0]
    for address in [*addresses[1::2], *more]:
        assert client.free(address, 0)


@pytest.mark.parametrize("network", NETWORKS)
def test_iterations_of_any_size_fit_a_limit_two_percent_above_the_peak_load(network: str) -> None:
    """Without marks no early sign tells the pool that an iteration outgrows the plan."""
    trace = varied(network, 2 << 30, 120)
    run = simulate(trace, "planned_growing", limit_bytes=int(1.02 * trace.load().max()))
    assert run.failed_at is None


SIZES = [1000 + 700 * k for k in range(20)]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(("growing", "room"), [(False, 1.3), (True, 1.05)])
def test_plan_takes_effect_with_hardly_more_memory_than_the_peak_load(
    network: str, growing: bool, room: float
) -> None:
    """Gradients are alive at each mark, too many to take the arena beside them."""
    trace = scaled(network, 2 * GIB, [1.0] * 40, marks=True)
    limit = int(room * trace.load().max())
    device = _core.ReplayDevice(limit, growing=growing)
    with replaying(trace, device, limit) as (pool, replay):
        late: dict[str, int] = {}
        while replay.go(400):
            pool.plan_now()
            if not late and pool.client.state()["iterations"] >= 30:
                late = pool.client.stats()["outcomes"]
        now = pool.client.stats()["outcomes"]
        assert {kind for kind in now if now[kind] != late[kind]} == {"hit"}
        assert pool.client.stats()["out_of_memory"] == 0


@pytest.mark.parametrize("low_water", [0, 1, 7, 19])
def test_allocations_from_the_low_water_mark_on_hit(low_water: int) -> None:
    core = Core()
    core.client.install(pattern(SIZES, low_water=low_water))
    core.step()
    assert (core.pool.stats()["arena_bytes"] == 0) == (low_water > 0)
    assert core.run(SIZES) == len(SIZES) - low_water
    core.step()
    assert core.run(SIZES) == len(SIZES)


def gradients(core: Core, sizes: Sequence[int], steps: int) -> list[int]:
    """Run iterations whose last three buffers are freed early in the next; return the arena after each."""
    arenas, kept = list[int](), list(core.live)
    for _ in range(steps):
        core.step()
        while kept:
            core.free(kept.pop())
        for size in sizes[:-3]:
            core.free(core.allocate(size))
        kept = [core.allocate(size) for size in sizes[-3:]]
        arenas.append(core.pool.stats()["arena_bytes"])
    return arenas


@pytest.mark.parametrize("low_water", [0, 1])
def test_fixed_arena_is_replaced_despite_live_buffers_at_each_mark(low_water: int) -> None:
    """No buffer lives in the arena at a low-water mark."""
    core = Core(page=0)
    core.client.install(pattern(SIZES, low_water=low_water))
    before = gradients(core, SIZES, 3)[-1]
    assert before > 0
    larger = [*SIZES[:5], 50_000, *SIZES[5:]]
    core.client.install(pattern(larger, low_water=low_water))
    assert gradients(core, larger, 6)[-1] >= max(before + 1, sum(larger))
    hits = core.hits
    gradients(core, larger, 2)
    assert core.hits == hits + 2 * len(larger)


def test_pinned_buffer_is_not_waited_for_in_vain_again_and_again() -> None:
    core = Core(page=0)
    core.client.install(pattern(SIZES))
    core.step()
    kept = core.allocate(SIZES[0])
    larger = [*SIZES, 50_000]
    core.client.install(pattern(larger))
    missed = []
    for _ in range(400):
        core.step()
        before = core.hits
        core.run(larger)
        missed.append(len(larger) - (core.hits - before))
    assert core.pool.stats()["arena_bytes"] < sum(larger)
    # The first position is taken and the last lies beyond the arena; what else?
    assert sum(count > 2 for count in missed) == 0
    core.free(kept)
    for _ in range(8):
        core.step()
        core.run(larger)
    assert core.pool.stats()["arena_bytes"] >= sum(larger)


@given(
    lives=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 100)), min_size=2, max_size=20),
    persistent=st.sets(st.integers(0, 19)),
)
def test_low_water_mark_is_the_allocation_before_which_least_is_alive(
    lives: list[tuple[int, int]], persistent: set[int]
) -> None:
    n = len(lives)
    life, size = np.array(lives).T * [[1], [1024]]
    stays = np.isin(np.arange(n), list(persistent))
    buffers = Buffers.of(np.arange(n), np.arange(n) + life, size, persistent=stays, period=n)
    planned = make_plan(pattern_of(buffers), alignment=64)
    assert planned is not None
    alive = [
        sum(
            int(size[k])
            for k in range(n)
            for turn in range(-31, 1)
            if not stays[k] and turn * n + k < at < turn * n + k + int(life[k])
        )
        for at in range(n)
    ]
    low_water = planned.low_water()
    if low_water:
        assert alive[low_water] == min(alive)
    else:
        assert alive[0] - min(alive) <= planned.plan.arena_bytes / 64


@pytest.mark.parametrize(("marks", "short", "slots"), [(True, True, 2), (True, False, 3), (False, True, 3)])
def test_marked_iterations_alternate_between_layouts_where_memory_is_short(
    marks: bool, short: bool, slots: int
) -> None:
    """Each buffer lives until the next but one: a ring of three needs three slots, a ring of six two."""
    with Pool(simulated(), background=False) as pool:
        pool.planner.reset_plans(alternate=short)
        alive: list[int] = []
        hits = []
        for number in range(240):
            if len(alive) == 2:
                pool.free(alive.pop(0))
            alive.append(pool.allocate(1000 + number % 3))
            if number % 3 == 2:
                hits.append(pool.client.stats()["outcomes"]["hit"])
                if marks:
                    pool.step()
                pool.plan_now()
        assert hits[-1] - hits[-11] == 30
        assert pool.report().to_dict()["planned_arena_bytes"] // 1000 == slots
