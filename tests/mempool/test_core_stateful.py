"""The native core compared with a naive model: a dict of live buffers, and sums."""

from __future__ import annotations

import bisect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import OUT_OF_MEMORY, FakeCuda
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mempool import _core

ROOMY = 1 << 40
sizes = st.one_of(
    st.integers(0, 600),
    st.integers(513, 20_000),
    st.integers(200_000, 900_000),
    st.sampled_from([4096, 8192, 1 << 18, 1 << 20, 1 << 50]),
)
planned_sizes = st.lists(
    st.one_of(st.integers(513, 5000), st.integers(513, 400_000)), min_size=1, max_size=20
)
streams = st.sampled_from([0, 0, 0, 2])  # of CUDA: the default stream, and one of the thread


class Gauge:
    """Current value, peak and total."""

    def __init__(self) -> None:
        self.current = self.peak = self.total = 0

    def add(self, amount: int) -> None:
        self.current += amount
        self.total += amount
        self.peak = max(self.peak, self.current)

    def expected(self) -> dict[str, int]:
        return {"current": self.current, "peak": self.peak, "total": self.total}


class Core(RuleBasedStateMachine):
    """State machine: no two live buffers overlap, and all counters are exact."""

    @initialize(
        page=st.sampled_from([0, 4096, 1 << 16, 1 << 21, 1 << 22]),
        alignment=st.sampled_from([64, 512, 1 << 14, 1 << 15]),
        capacity=st.sampled_from([ROOMY, ROOMY, 1 << 20, 8 << 20]),
        small=st.sampled_from([0, 512, 512, 1 << 20]),
    )
    def make(self, page: int, alignment: int, capacity: int, small: int) -> None:
        self.device: Any = _core.SimulatedDevice(
            capacity=capacity,
            page=page,
            alignment=min(alignment, page or alignment),
            shared_segment=1 << 20,
            large=1 << 18,
        )
        self.begin(self.device, small, roomy=capacity == ROOMY)

    def begin(self, device: _core.Device, small: int, *, roomy: bool) -> None:
        self.alignment = device.alignment
        self.pool = _core.Pool(device=device, small_bytes=small, recorded_events=64)
        self.client = _core.Client(self.pool, "test")
        self.live: dict[int, int] = {}
        self.begins: list[int] = []
        self.dead: list[int] = []
        self.requested, self.blocks = Gauge(), Gauge()
        self.refused_frees = self.out_of_memory = self.depth = 0
        self.stream_of: dict[int, int] = {}
        self.freed_abroad = 0  # bytes freed on other streams since the last synchronisation
        self.roomy = roomy
        self.patterns: list[tuple[Any, list[int]]] = []

    # --- updates of the model

    def insert(self, address: int, size: int, stream: int = 0) -> None:
        assert address % self.alignment == 0
        at = bisect.bisect(self.begins, address)
        if at > 0:
            assert self.begins[at - 1] + self.live[self.begins[at - 1]] <= address
        if at < len(self.begins):
            assert address + size <= self.begins[at]
        self.begins.insert(at, address)
        self.live[address] = size
        self.stream_of[address] = stream
        self.requested.add(size)
        self.blocks.add(1)

    def remove(self, address: int, stream: int = 0) -> int:
        self.begins.remove(address)
        self.freed_abroad += self.stream_of.pop(address) != stream
        size = self.live.pop(address)
        self.requested.current -= size
        self.blocks.current -= 1
        self.dead.append(address)
        return size

    def take(self, size: int, stream: int) -> None:
        address = self.client.allocate(size, stream)
        size = max(size, 1)
        if address == 0:
            self.out_of_memory += 1
            assert not self.roomy or size > ROOMY
            assert _core.Client.last_out_of_memory()["asked_bytes"] == size
        else:
            self.insert(address, size, stream)

    # --- calls of a program

    @rule(size=sizes, stream=streams)
    def allocate(self, size: int, stream: int) -> None:
        self.take(size, stream)

    @precondition(lambda self: self.patterns)
    @rule(data=st.data(), part=st.integers(1, 20), keep=st.integers(0, 3))
    def follow(self, data: st.DataObject, part: int, keep: int) -> None:
        """Allocate as a pattern expects, and free most of the buffers."""
        self.follow_pattern(data.draw(st.sampled_from(self.patterns))[1], part, keep)

    def follow_pattern(self, expected: list[int], part: int, keep: int) -> None:
        before = set(self.live)
        for size in expected[:part]:
            self.take(size, 0)
        for address in sorted(set(self.live) - before)[keep:]:
            self.remove(address)
            assert self.client.free(address, 0)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), stream=streams)
    def free(self, data: st.DataObject, stream: int) -> None:
        address = data.draw(st.sampled_from(self.begins))
        self.remove(address, stream)
        assert self.client.free(address, stream)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), size=sizes)
    def reallocate(self, data: st.DataObject, size: int) -> None:
        address = data.draw(st.sampled_from(self.begins))
        resizes = self.device.counts().resizes
        moved, foreign = self.client.reallocate(address, size)
        assert not foreign
        if moved == 0:
            self.out_of_memory += 1
            return
        # In place or with remapped pages there is only one buffer at any time.
        if moved == address or self.device.counts().resizes > resizes:
            stream = self.stream_of[address]
            self.remove(address)
            self.insert(moved, max(size, 1), stream)
        else:
            self.insert(moved, max(size, 1))
            self.remove(address)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(self.dead))
        if address not in self.live:
            assert not self.client.free(address)
            self.refused_frees += 1

    @rule(data=st.data(), inside=st.integers(1, 600))
    def free_what_is_not_ours(self, data: st.DataObject, inside: int) -> None:
        base = data.draw(st.sampled_from(self.begins)) if self.begins else 0
        if base + inside not in self.live:
            assert not self.client.free(base + inside)
            self.refused_frees += 1

    @rule(mark=st.sampled_from([_core.Mark.STEP] * 5 + [_core.Mark.BEGIN, _core.Mark.BEGIN, _core.Mark.END]))
    def mark(self, mark: _core.Mark) -> None:
        self.client.mark(mark)

    @rule(enter=st.sampled_from([False, False, False, True]))
    def dynamic_scope(self, enter: bool) -> None:
        if enter:
            self.client.enter_dynamic()
        else:
            self.client.leave_dynamic()

    # --- calls of a planner

    @rule(
        wanted=planned_sizes,
        unroll=st.integers(1, 3),
        truth=st.booleans(),
        data=st.data(),
        streams=st.sampled_from([(0,), (0,), (2,), (0, 2)]),
        warm_up=st.booleans(),
        load=st.sampled_from([True, True, False]),
        follow=st.lists(st.tuples(st.integers(1, 20), st.sampled_from([0, 0, 1, 3])), max_size=3),
    )
    def new_pattern(
        self,
        wanted: list[int],
        unroll: int,
        truth: bool,
        data: st.DataObject,
        streams: tuple[int, ...],
        warm_up: bool,
        load: bool,
        follow: list[tuple[int, int]],
    ) -> None:
        ends = np.cumsum([-(-size // self.alignment) * self.alignment for size in wanted])
        if truth:
            offset = np.tile(np.concatenate([[0], ends[:-1]])[:, None], (1, unroll))
        else:
            slots = st.integers(-1, int(ends[-1]) // self.alignment)
            drawn = data.draw(st.lists(slots, min_size=len(wanted) * unroll, max_size=len(wanted) * unroll))
            offset = np.array(drawn).reshape(len(wanted), unroll) * self.alignment
            offset[offset < 0] = -1
        arena = int((offset.max(axis=1) + np.array(wanted)).max())

        def made(*, cyclic: bool) -> _core.Pattern:
            pattern = _core.Pattern(cyclic=cyclic, unroll=unroll, arena_bytes=max(arena, 0))
            for stream in streams:
                pattern.add_table(
                    sequence=0,
                    stream=stream,
                    sizes=np.array(wanted, np.int64),
                    offsets=np.ascontiguousarray(offset, np.int64),
                    marks=[] if cyclic else [0, len(wanted)],
                )
            return pattern

        steady = made(cyclic=True)
        self.patterns.append((steady, wanted))
        if load:
            self.client.load(made(cyclic=False) if warm_up else None, steady)
        else:
            self.client.install(steady)
        for part, keep in follow:
            self.follow_pattern(wanted, part, keep)

    @precondition(lambda self: self.patterns)
    @rule(data=st.data())
    def stale_pattern(self, data: st.DataObject) -> None:
        pattern, _ = data.draw(st.sampled_from(self.patterns))
        self.client.install(pattern)

    @rule()
    def drop_patterns(self) -> None:
        self.client.drop_patterns()

    @rule(on=st.booleans())
    def record(self, on: bool) -> None:
        self.client.set_recording(on)
        self.client.set_tracing(on)
        packed, _, counts, _ = self.client.recording()
        assert len(packed) % 24 == 0
        assert sum(counts) <= self.blocks.total + self.out_of_memory

    # --- the device and its limits

    @rule(calls=st.integers(0, 5))
    def device_fails(self, calls: int) -> None:
        self.device.fail_after(calls)
        self.roomy = False

    @rule(stream=streams)
    def device_goes_on(self, stream: int) -> None:
        self.device.finish(stream)

    @rule()
    def all_is_done(self) -> None:
        """Finish all streams; frees on foreign streams no longer wait."""
        self.finish()
        self.freed_abroad = 0

    def finish(self) -> None:
        for stream in (0, 2):
            self.device.finish(stream)
        self.pool.trim()
        assert self.client.stats()["deferred_blocks"] == 0

    @rule(roomy=st.booleans())
    def device_recovers(self, roomy: bool) -> None:
        self.device.fail_after((1 << 64) - 1)
        self.device.set_capacity(ROOMY if roomy else self.device.counts().committed + (1 << 20))
        self.roomy = roomy
        self.pool.set_max_reserved((1 << 64) - 1)

    @rule(more=st.integers(0, 1 << 21))
    def limit(self, more: int) -> None:
        self.pool.set_max_reserved(self.pool.stats()["reserved"]["current"] + more)
        self.roomy = False

    @rule(limit=st.sampled_from([0, 1 << 20, 1 << 30]))
    def retain(self, limit: int) -> None:
        self.pool.set_retained_limit(limit)

    @rule()
    def trim(self) -> None:
        self.pool.trim()

    @rule()
    def release_arena(self) -> None:
        in_arena = self.pool.stats()["arena_live_ranges"]
        assert self.pool.release_arena() == (in_arena == 0)

    @rule()
    def reset_peaks(self) -> None:
        self.client.reset_peaks()
        for gauge in (self.requested, self.blocks):
            gauge.peak = gauge.current

    @invariant()
    def the_books_are_exact(self) -> None:
        if not hasattr(self, "pool"):
            return
        stats, pool, counts = self.client.stats(), self.pool.stats(), self.device.counts()
        assert stats["requested"] == self.requested.expected()
        assert stats["blocks"] == self.blocks.expected()
        assert pool["live_blocks"] == len(self.live) + stats["deferred_blocks"]
        assert stats["deferred_blocks"] <= self.freed_abroad
        assert stats["out_of_memory"] == self.out_of_memory
        assert stats["double_frees"] + stats["foreign_frees"] == self.refused_frees
        assert self.requested.current <= stats["live"]["current"] <= pool["reserved"]["current"]
        assert pool["reserved"]["current"] == counts.committed
        assert pool["reserved"]["peak"] <= counts.peak_committed
        assert counts.errors == 0
        served = sum(stats["outcomes"].values()) + stats["small"]["total"]
        assert served == self.blocks.total
        for address in self.begins[:3]:
            assert self.pool.owns(address)

    @rule()
    def a_snapshot_agrees(self) -> None:
        packed_segments, packed_blocks, _ = _core.snapshot(self.pool, None)
        segments = np.frombuffer(packed_segments, list(_core.SEGMENT_FIELDS))
        blocks = np.frombuffer(packed_blocks, list(_core.BLOCK_FIELDS))
        live, waiting = (blocks[blocks["state"] == _core.BLOCK_STATES.index(s)] for s in ("live", "waiting"))
        assert int(segments["size"].sum()) == self.pool.stats()["reserved"]["current"]
        assert dict(zip(live["address"].tolist(), live["requested"].tolist(), strict=True)) == self.live
        assert len(waiting) == self.client.stats()["deferred_blocks"]

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for address in list(self.begins):
            self.remove(address)
            assert self.client.free(address)
        assert self.client.stats()["live"]["current"] == 0
        self.client.drop_patterns()
        self.finish()
        assert self.pool.release_arena()
        counts = self.device.counts()
        assert (counts.committed, counts.live_reservations, counts.errors) == (0, 0, 0)
        assert counts.events_alive == 0


TestCore = Core.TestCase
TestCore.settings = settings(max_examples=40, stateful_step_count=50)


class CountedCuda:
    """A CUDA device on the fake driver with the setup and counters of a simulated device."""

    def __init__(self, fake: FakeCuda, memory: str) -> None:
        self.fake = fake
        self.device = fake.device(memory=memory)

    def counts(self) -> SimpleNamespace:
        return SimpleNamespace(
            committed=self.fake.live_bytes(),
            peak_committed=self.fake.peak_bytes(),
            resizes=0,
            live_reservations=self.fake.live_allocations,
            events_alive=_core.live_objects()[
                "events"
            ],  # the device keeps some events of the driver for reuse
            errors=self.device.errors + len(self.fake.faults),
        )

    def fail_after(self, calls: int) -> None:
        for symbol in ("cuMemAlloc_v2", "cuMemCreate"):
            self.fake.fail(symbol, OUT_OF_MEMORY, after=min(calls, 1 << 30))

    def set_capacity(self, capacity: int) -> None:
        self.fake.set_capacity(capacity)

    def finish(self, stream: int) -> None:
        self.fake.finish(stream)


class CoreOnCuda(Core):
    """The same state machine on a CUDA device that copies and zeroes as late as possible."""

    fake: FakeCuda

    @initialize(
        capacity=st.sampled_from([ROOMY, ROOMY, 1 << 20, 24 << 20, 64 << 20]),
        small=st.sampled_from([0, 512, 512, 1 << 20]),
        memory=st.sampled_from(["plain", "growing"]),
    )
    def make(self, capacity: int, small: int, memory: str) -> None:
        self.fake.reset()
        self.fake.set_capacity(capacity)
        self.device = CountedCuda(self.fake, memory)
        self.begin(self.device.device, small, roomy=capacity == ROOMY)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:  # no state may reach the next driver
            for name in ("client", "pool", "device"):
                self.__dict__.pop(name, None)


@pytest.fixture(scope="module", autouse=True)
def _driver(fake_library: Path) -> None:
    CoreOnCuda.fake = FakeCuda(fake_library)


TestCoreOnCuda = CoreOnCuda.TestCase
TestCoreOnCuda.settings = settings(max_examples=30, stateful_step_count=50)
