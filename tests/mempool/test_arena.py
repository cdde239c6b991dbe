"""The arena's life: growth, drain, plan bypass, conversion to segments, refusal and dormant plans.

One stateful model holds what is true in every order of these, and a table of scenarios what each is for.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest
from cores import STEP, Core, pattern
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sequences import NETWORKS, scaled, varied

from mempool import _core
from mempool.simulate import replaying, simulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PAGE, MIB = 4096, 1 << 20
#: No size fits the slot of another position, nor does one an eighth larger.
SIZES = [57_600 + 4480 * k for k in range(120)]
FEW = SIZES[:40]
LEAST = [size - 640 for size in SIZES]
SMALLER = [size - 320 for size in SIZES]
LARGER = [size * 9 // 8 for size in SIZES]
SEVERAL = 6  # larger buffers by which an iteration counts as outgrown
PATIENCE = 256  # allocations of a plan bypass that wait for an empty arena
LONGEST_PAUSE = 1024  # iterations between two attempts to take an arena
PLANS: dict[str, dict[str, Any]] = {
    "constant": {"sizes": FEW},
    "envelope": {"sizes": FEW, "least": LEAST[:40]},
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


# --- growth and drain


def following(**options: int) -> Core:
    """Return a core at the beginning of an iteration of an envelope that is in effect."""
    core = Core(**options)
    core.client.install(pattern(SIZES, least=LEAST))
    for _ in range(3):
        core.step()
        hits = core.run(SMALLER)
    assert hits == len(SIZES)
    core.step()
    return core


def run_one_by_one(core: Core, sizes: Sequence[int]) -> int:
    """Free each buffer before the next; return the number of hits."""
    before = core.hits
    for size in sizes:
        core.free(core.allocate(size))
    return core.hits - before


@pytest.mark.parametrize("low_water", [0, 1, 7, 19])
def test_arena_is_taken_at_the_low_water_mark(low_water: int) -> None:
    core = Core()
    core.step()
    core.client.install(pattern(SIZES, low_water=low_water))
    core.step()
    assert (arena(core) == 0) == (low_water > 0)
    assert core.run(SIZES) == len(SIZES) - low_water


@pytest.mark.parametrize("low_water", [0, 1])
def test_fixed_arena_is_replaced_despite_live_buffers_at_each_mark(low_water: int) -> None:
    """No buffer lives in the arena at a low-water mark; else surviving buffers are served elsewhere."""
    core, kept = Core(page=0), list[int]()
    larger = [*SIZES[:5], 900_001, *SIZES[5:]]
    for sizes in (SIZES, larger):
        core.client.install(pattern(sizes, low_water=low_water))
        for _ in range(8):
            core.step()
            while kept:
                core.free(kept.pop())
            hits = run_one_by_one(core, sizes[:-3])
            kept = [core.allocate(size) for size in sizes[-3:]]
        assert (arena(core) >= sum(sizes), hits) == (True, len(sizes) - 3)


@pytest.mark.parametrize("more", [0, 10_240, 30_720])
def test_slots_are_seldom_drained_for_a_larger_arena_out_of_reach(more: int) -> None:
    """Memory suffices for the larger arena alone, or also for the buffers beside the present arena."""
    small, large = [10_240] * 4, [10_240] * 4 + [40_960] * 4
    core, kept = Core(page=0, large=4096, shared=4096, limit=sum(large) + more), list[int]()
    core.step()
    misses = 0
    for sizes, steps in ((small, 4), (large, 1000)):
        core.client.install(pattern(sizes))
        for number in range(steps):
            core.step()
            before = core.misses
            made = [core.allocate(size) for size in small[:3]]
            while kept:
                core.free(kept.pop())
            kept.append(core.allocate(small[3]))
            for address in made:
                core.free(address)
            misses += core.misses - before if number >= 500 else 0
    assert misses <= 8


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(("growing", "room"), [(False, 1.3), (True, 1.05)])
def test_plan_takes_effect_with_hardly_more_memory_than_the_peak_load(
    network: str, growing: bool, room: float
) -> None:
    """Gradients are alive at each mark, too many to take the arena beside them."""
    trace = scaled(network, 2 << 30, [1.0] * 40, marks=True)
    limit = int(room * trace.load().max())
    with replaying(trace, _core.ReplayDevice(limit, growing=growing), limit) as (pool, replay):
        late: dict[str, int] = {}
        while replay.go(400):
            pool.plan_now()
            if not late and pool.client.state()["iterations"] >= 30:
                late = pool.client.stats()["outcomes"]
        now = pool.client.stats()["outcomes"]
        assert {outcome for outcome in now if now[outcome] != late[outcome]} == {"hit"}
        assert pool.client.stats()["out_of_memory"] == 0


# --- bypass of the plan


@pytest.mark.parametrize("page", [0, PAGE])
@pytest.mark.parametrize("stays", [0, 1, SEVERAL])
def test_outgrown_iteration_gets_the_arena_memory_once_former_buffers_are_freed(
    page: int, stays: int
) -> None:
    core = following(page=page)
    gradients = [core.allocate(size) for size in SIZES[:stays]]
    core.step()
    before = arena(core)
    batch = [core.allocate(size) for size in LARGER[:SEVERAL]]
    for address in gradients:
        core.free(address)
    batch += [core.allocate(size) for size in LARGER[SEVERAL:]]
    assert arena(core) <= (before / 8 if page else 0)
    assert core.committed <= 1.3 * sum(LARGER) + arena(core)
    for address in batch:
        core.free(address)
    core.step()
    assert core.run(SIZES) == len(SIZES)


@pytest.mark.parametrize("stays", [False, True])
def test_pinned_buffer_in_an_arena_without_pages_ends_the_bypass(stays: bool) -> None:
    core = Core(page=0)
    sizes = [*SIZES[:SEVERAL], *(1000 + 8 * k for k in range(2 * PATIENCE)), 10**10]
    core.client.install(pattern(sizes, least=[size - 4 for size in sizes]))
    for _ in range(2):
        core.step()
        run_one_by_one(core, sizes)
    core.step()
    pinned = core.allocate(sizes[0])
    if not stays:
        core.free(pinned)
    core.step()
    hits = run_one_by_one(core, [*LARGER[:SEVERAL], *sizes[SEVERAL:]])
    assert (arena(core) > 0) == stays
    assert hits == (len(sizes) - SEVERAL - PATIENCE + 1 if stays else 0)


@pytest.mark.parametrize("position", [0, SEVERAL - 1, SEVERAL, SEVERAL + 1, 31])
def test_iteration_that_outgrows_the_plan_late_keeps_the_arena(position: int) -> None:
    core = following()
    run_one_by_one(core, [*SMALLER[:position], *(LARGER[position : position + SEVERAL])])
    assert (arena(core) == 0) == (position <= SEVERAL)


@pytest.mark.parametrize("position", [0, 3, 7])
@pytest.mark.parametrize("count", [1, SEVERAL - 1])
def test_few_extra_buffers_do_not_bypass_the_plan(position: int, count: int) -> None:
    core = following()
    assert core.run([*SMALLER[:position], *[900_001] * count, *SMALLER[position:]]) == len(SIZES)


@pytest.mark.parametrize("recorded", ["nothing", "ring", "trace"])
def test_bypass_is_the_same_while_recording(recorded: str) -> None:
    core = following()
    core.client.set_recording(recorded == "ring")
    core.client.set_tracing(recorded == "trace")
    core.run(LARGER)
    assert arena(core) == 0
    core.client.set_tracing(False)


@pytest.mark.parametrize(("limit", "times"), [(1 << 40, 5), (60 * MIB, 16)])
def test_bypass_backs_off_where_memory_beside_the_arena_suffices(limit: int, times: int) -> None:
    core = following(limit=limit)
    assert limit > 1 << 30 or limit / 2 < arena(core) < limit
    bypassed = 0
    for _ in range(16):
        run_one_by_one(core, LARGER[:SEVERAL])
        bypassed += arena(core) == 0
        core.step()
    assert bypassed == times


@pytest.mark.parametrize("reason", ["budget", "client"])
def test_bypass_keeps_an_arena_within_a_budget_and_among_clients(reason: str) -> None:
    core = following()
    other = _core.Client(core.pool, "other") if reason == "client" else None
    if other is None:
        core.pool.set_budget(2 * arena(core))
    before = arena(core)
    run_one_by_one(core, LARGER)
    assert arena(core) == before


@pytest.mark.parametrize("low_water", [0, 9])
def test_plan_installed_during_the_bypass_takes_no_arena(low_water: int) -> None:
    core = Core()
    core.client.install(pattern(SIZES, least=LEAST, low_water=low_water))
    for _ in range(3):
        core.step()
        core.run(SIZES)
    core.step()
    run_one_by_one(core, LARGER[:20])
    core.client.install(pattern(LARGER, least=LEAST, low_water=low_water))
    run_one_by_one(core, LARGER[20:])
    assert arena(core) == 0
    for _ in range(2):
        core.step()
        hits = core.run(LARGER)
    assert hits == len(LARGER)


@pytest.mark.parametrize("network", NETWORKS)
def test_growing_lengths_fit_a_limit_ten_percent_above_the_peak_load(network: str) -> None:
    shares = [0.2 + 0.8 * ((7 * number) % 13) / 12 for number in range(5 * 13)]
    trace = scaled(network, 2048 * MIB, shares, marks=True)
    for allocator, most in (("planned_online", 1.3), ("planned_growing", 1.15)):
        assert simulate(trace, allocator).peak_reserved_bytes <= most * trace.load().max()
    limit = int(1.1 * trace.load().max())
    with replaying(trace, _core.ReplayDevice(limit, growing=True), limit) as (pool, replay):
        while replay.go(400):
            pool.plan_now()
        assert pool.client.stats()["out_of_memory"] == 0


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


@pytest.mark.parametrize(("page", "count", "converted"), [(PAGE, 6, 1), (0, 3, 0)])
def test_free_memory_of_an_arena_with_pages_serves_requests(page: int, count: int, converted: int) -> None:
    core, _ = half_full(page=page)
    while address := core.client.allocate(WIDE, 0):
        core.live[address] = WIDE
    assert (sum(size == WIDE for size in core.live.values()), conversions(core)) == (count, converted)
    core.give_everything_back()


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
