"""Several clients on one memory against a naive model: no two live buffers overlap."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mempool import _core

CAPACITY = 64 << 20
sizes = st.one_of(st.integers(1, 600), st.integers(513, 20_000), st.sampled_from([1 << 18, 1 << 20, 5 << 20]))
which = st.integers(0, 2)


class Clients(RuleBasedStateMachine):
    """Clients in turns, with plans of their own in one arena; each client's counters are exact and add up."""

    @initialize(page=st.sampled_from([0, 4096, 1 << 16]), capacity=st.sampled_from([8 << 20, CAPACITY]))
    def make(self, page: int, capacity: int) -> None:
        self.device: Any = _core.SimulatedDevice(
            capacity=capacity, page=page, alignment=512, shared_segment=1 << 20, large=1 << 18
        )
        self.pool: Any = _core.Pool(device=self.device, recorded_events=64)
        self.clients = [_core.Client(self.pool, str(number)) for number in range(3)]
        self.live: dict[int, tuple[int, int]] = {}  # address -> whose (3: of a replaced client), size
        self.begins: list[int] = []
        self.plans: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}

    def take(self, whose: int, size: int) -> int:
        address: int = self.clients[whose].allocate(size)
        if address:
            self.insert(address, whose, size)
        return address

    def insert(self, address: int, whose: int, size: int) -> None:
        at = bisect.bisect(self.begins, address)
        if at > 0:
            assert self.begins[at - 1] + self.live[self.begins[at - 1]][1] <= address, "two buffers overlap"
        if at < len(self.begins):
            assert address + size <= self.begins[at], "two buffers overlap"
        self.begins.insert(at, address)
        self.live[address] = whose, size

    def give(self, address: int, by: int = 0) -> None:
        del self.live[address]
        self.begins.remove(address)
        assert self.clients[by].free(address)
        assert not self.clients[by].free(address)

    # --- programs

    @rule(whose=which, size=sizes)
    def allocate(self, whose: int, size: int) -> None:
        self.take(whose, size)

    @precondition(lambda self: self.begins)
    @rule(data=st.data(), by=which)
    def free(self, data: st.DataObject, by: int) -> None:
        self.give(data.draw(st.sampled_from(self.begins)), by)

    @precondition(lambda self: self.begins)
    @rule(data=st.data(), by=which, size=sizes)
    def reallocate(self, data: st.DataObject, by: int, size: int) -> None:
        """A reallocated buffer belongs to the client that reallocates."""
        old = data.draw(st.sampled_from(self.begins))
        address, foreign = self.clients[by].reallocate(old, size)
        assert not foreign
        if address:
            self.begins.remove(old)
            del self.live[old]
            self.insert(address, by, size)

    @rule(whose=which)
    def step(self, whose: int) -> None:
        self.clients[whose].mark(_core.Mark.STEP)

    @rule(order=st.lists(which, min_size=1, max_size=40), keep=st.integers(0, 3), data=st.data())
    def follow_in_turns(self, order: list[int], keep: int, data: st.DataObject) -> None:
        """Let each client follow a plan, interleaved with the others. Most buffers are freed again."""
        chosen = {
            whose: iter(data.draw(st.sampled_from(plans))) for whose, plans in self.plans.items() if plans
        }
        fresh = []
        for whose in order:
            size = next(chosen.get(whose, iter(())), 0)
            fresh.append(self.take(whose, size) if size else 0)
        for address in [a for a in fresh if a][keep:]:
            self.give(address)

    # --- planners

    @rule(
        whose=which,
        wanted=st.lists(st.integers(513, 300_000), min_size=1, max_size=12),
        load=st.booleans(),
    )
    def plan(self, whose: int, wanted: list[int], load: bool) -> None:
        offsets = np.concatenate([[0], np.cumsum([-(-size // 512) * 512 for size in wanted])[:-1]])
        made = _core.Pattern(cyclic=True, unroll=1, arena_bytes=int(offsets[-1]) + wanted[-1])
        made.add_table(
            sequence=0,
            stream=0,
            sizes=np.array(wanted, np.int64),
            offsets=np.ascontiguousarray(offsets.reshape(-1, 1), np.int64),
            marks=[],
        )
        if load:
            self.clients[whose].load(None, made)
        else:
            self.clients[whose].install(made)
        self.plans[whose].append(wanted)

    @rule(whose=which)
    def drop_patterns(self, whose: int) -> None:
        self.clients[whose].drop_patterns()

    @rule(whose=which, bytes_kept=st.sampled_from([0, 1 << 20, 1 << 40]))
    def wish(self, whose: int, bytes_kept: int) -> None:
        self.clients[whose].set_retained_limit(bytes_kept)

    @rule(whose=which, force=st.booleans())
    def give_back(self, whose: int, force: bool) -> None:
        in_arena = self.pool.stats()["arena_live_ranges"]
        none_left = self.clients[whose].give_back(force)
        assert not (none_left and in_arena)

    @rule(whose=which)
    def look_at_the_clock(self, whose: int) -> None:
        self.clients[whose].wait_for_work(0.0)

    @rule(whose=which)
    def another_one(self, whose: int) -> None:
        """Replace a client by a new client, which counts none of the former's buffers."""
        self.clients[whose] = _core.Client(self.pool, "fresh")
        self.plans[whose] = []
        self.live = {a: (3 if owner == whose else owner, size) for a, (owner, size) in self.live.items()}

    # --- what holds

    @invariant()
    def the_books_add_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, live = self.pool.stats(), 0
        for number, client in enumerate(self.clients):
            stats = client.stats()
            mine = [size for owner, size in self.live.values() if owner == number]
            assert (stats["blocks"]["current"], stats["requested"]["current"]) == (len(mine), sum(mine))
            live += stats["live"]["current"]
        assert pool["live_blocks"] == len(self.live)
        assert live <= pool["reserved"]["current"] == self.device.counts().committed
        assert len(self.pool.clients()) == 3

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for address in list(self.begins):
            self.give(address)
        for client in self.clients:
            client.drop_patterns()
        assert self.clients[0].give_back(force=True)
        self.clients.clear()
        assert (self.device.counts().committed, self.device.counts().errors) == (0, 0)


TestClients = Clients.TestCase
TestClients.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
