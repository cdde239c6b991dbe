"""Several streams, and captured graphs: host order is not device order."""

from __future__ import annotations

import numpy as np
import pytest
from cores import Core, pattern
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pools import run, simulated

from mempool import Pool, _core
from mempool.recording.events import EventConverter
from traces.trace import EventType

BIG = 300_000
SIZES = st.sampled_from([100, 2_000, 60_000, BIG])


@pytest.fixture
def core() -> Core:
    return Core(page=0)


class TestABufferThatAnotherStreamUses:
    """A buffer used by another stream: the memory is reused only after that stream has finished."""

    @pytest.mark.parametrize("size", [100, 60_000, BIG])
    def test_memory_waits_for_a_stream_using_the_buffer(self, core: Core, size: int) -> None:
        core.pool.set_retained_limit(1 << 40)
        first = core.allocate(size)
        assert core.client.use(first, 7)
        core.free(first)
        assert core.client.stats()["live"]["current"] == 0
        assert core.pool.stats()["deferred"]["current"] >= size
        core.client.mark(_core.Mark.STEP)
        other = core.allocate(size)
        assert other != first
        core.device.finish(7)
        core.client.mark(_core.Mark.STEP)
        assert core.pool.stats()["deferred"]["current"] == 0
        assert core.allocate(size) == first

    def test_is_had_back_before_memory_runs_out(self) -> None:
        core = Core(page=0, capacity=3 * BIG)
        first = core.allocate(2 * BIG)
        core.client.use(first, 7)
        core.free(first)
        core.allocate(2 * BIG)
        assert core.device.counts().synchronizes > 0

    def test_buffer_used_by_another_stream_is_left_out_of_the_plan(self) -> None:
        """The end of the stream's use is unknown; all other buffers hit."""
        device = simulated(page=0)
        with Pool(device, background=False) as pool:

            def iteration(number: int) -> None:
                addresses = [pool.allocate(size) for size in (BIG, 2 * BIG, 3 * BIG)]
                pool.client.use(addresses[1], 7)
                for address in addresses:
                    pool.free(address)
                device.finish(7)

            run(pool, iteration, 12, marks=True)
            assert pool.planned is not None
            assert pool.planned.buffers.persistent.tolist() == [False, True, False]
            steady = pool.report().to_dict()
            outcomes = pool.client.stats()["steady"]
            assert outcomes["hit"] > 0
            assert outcomes["slot_occupied"] == 0, steady

    def test_use_by_another_stream_is_a_read_in_the_trace(self) -> None:
        pool = _core.Pool(device=simulated(page=0))
        client = _core.Client(pool, "test")
        client.set_tracing(True)
        client.set_recording(True)
        pool.set_retained_limit(1 << 40)
        first = client.allocate(BIG, 1)
        client.use(first, 7)
        client.free(first, 1)
        pool.trim()
        second = client.allocate(BIG, 1)
        client.use(second, 8)
        recording = EventConverter(64)
        packed, streams, *_ = client.recording()
        tape = client.take_trace()
        for trace in (recording.trace(tape), EventConverter(64).convert_brief(packed, streams)):
            trace.validate()
            reads = np.flatnonzero(trace.kind == EventType.READ)
            assert trace.stream[reads].tolist() == [7, 8]
            assert trace.buffer[reads].tolist() == [0, 1]


class TestABufferThatAnotherStreamFrees:
    """A buffer freed by another stream: its own stream gets the memory back, and neither waits."""

    @pytest.mark.parametrize("used_too", [False, True])
    @pytest.mark.parametrize("size", [100, 60_000, BIG])
    def test_memory_returns_to_its_stream_after_the_freeing_stream_has_passed(
        self, core: Core, size: int, used_too: bool
    ) -> None:
        core.pool.set_retained_limit(1 << 40)
        first = core.allocate(size, 1)
        if used_too:
            assert core.client.use(first, 7)
        core.free(first, 5)
        for stream in (5, 7) if used_too else (5,):
            assert core.pool.stats()["live_blocks"] == 1
            address = core.allocate(size, 1)
            assert address != first
            core.free(address, 1)
            core.device.finish(stream)
        core.step()
        assert core.allocate(size, 1) == first

    @pytest.mark.parametrize("size", [100, 60_000, BIG])
    def test_memory_freed_by_another_stream_does_not_pile_up(self, core: Core, size: int) -> None:
        core.pool.set_retained_limit(1 << 40)
        own = core.allocate(size, 5)
        for _ in range(200):
            address = core.allocate(size, 1)
            core.free(address, 5)
            core.device.finish(5)
        core.free(own, 5)
        assert core.pool.stats()["reserved"]["peak"] <= max(4 * size, 4 << 20)
        assert core.device.counts().synchronizes == 0

    def test_allocation_out_of_memory_waits_for_memory_freed_by_another_stream(self) -> None:
        core = Core(page=0, capacity=3 * BIG, shared=BIG)
        for _ in range(20):
            core.free(core.allocate(BIG, 1), 5)
        assert core.client.stats()["out_of_memory"] == 0


class TestACapturedGraph:
    """A captured graph: no other allocation gets the graph's memory while a replay is possible."""

    def test_graph_keeps_its_memory_until_released(self, core: Core) -> None:
        core.pool.set_retained_limit(1 << 40)
        core.pool.begin_graph((0, 1), [5])
        inside = [core.allocate(size, 5) for size in (100, 60_000, BIG)]
        core.free(inside.pop(), 5)
        outside = core.allocate(BIG)
        core.pool.end_graph((0, 1))
        for address in inside:
            core.free(address, 5)
        reserved = core.pool.stats()["reserved"]["current"]
        core.pool.trim()
        assert core.pool.stats()["reserved"]["current"] == reserved
        taken = [core.allocate(size, 5) for size in (100, 60_000, BIG)]
        assert not set(taken) & set(inside)
        core.pool.release_graph((0, 1))
        core.pool.trim()
        assert core.pool.stats()["graph_pools"] == 0
        for address in (*taken, outside):
            core.free(address, 5 if address != outside else 0)
        core.give_everything_back()

    def test_captures_of_a_graph_pool_reuse_its_memory(self, core: Core) -> None:
        for _ in range(2):
            core.pool.begin_graph((0, 1), [5])
            addresses = {core.run([BIG], 5): 0 for _ in range(3)}
            core.pool.end_graph((0, 1))
        assert len(addresses) == 1
        assert core.pool.stats()["reserved"]["current"] < 2 * BIG
        core.pool.release_graph((0, 1))
        assert core.pool.stats()["graph_pools"] == 1
        core.pool.release_graph((0, 1))
        assert core.pool.stats()["graph_pools"] == 0

    def test_allocations_during_a_capture_are_outside_the_plan(self, core: Core) -> None:
        core.client.load(None, pattern([BIG, BIG]))
        core.step()
        first = core.allocate(BIG)
        core.pool.begin_graph((0, 1), [0])
        inside = core.allocate(BIG)
        core.pool.end_graph((0, 1))
        core.free(first)
        core.allocate(BIG)
        assert (core.hits, core.misses) == (2, 0)
        assert core.outcomes["out_of_iteration"] == 1
        core.free(inside)

    @pytest.mark.parametrize("change", ["release", "drop", "move", "resize"])
    def test_arena_and_segments_do_not_change_during_a_capture(self, change: str) -> None:
        core = Core(page=4096)
        core.client.load(None, pattern([BIG, BIG, BIG]))
        core.step()
        first = core.allocate(BIG)
        if change in ("move", "release"):
            core.free(first)
        large = core.client.allocate(2 * BIG)
        core.pool.begin_graph((0, 1), [5])
        core.device.capture([5])
        if change == "release":
            assert not core.pool.release_arena()
        elif change == "drop":
            core.client.drop_patterns()
        elif change == "move":
            core.client.load(None, pattern([BIG], stream=1))
            core.step()
            core.client.allocate(BIG, 1)
        else:
            core.client.reallocate(large, 4 * BIG)
        assert core.device.counts().errors == 0


class Streams(RuleBasedStateMachine):
    """Streams: no memory still in use by a stream is handed out, and no capture is invalidated."""

    @initialize(
        page=st.sampled_from([0, 0, 4096]),
        capacity=st.sampled_from([1 << 40, 8 * BIG]),
        retained=st.sampled_from([0, 1 << 40]),
    )
    def make(self, page: int, capacity: int, retained: int) -> None:
        self.core = Core(page=page, capacity=capacity)
        self.core.pool.set_retained_limit(retained)
        self.client, self.pool, self.device = self.core.client, self.core.pool, self.core.device
        self.live: dict[int, tuple[int, int]] = {}  # address: size, stream
        self.uses: dict[int, set[int]] = {}
        self.busy: list[tuple[int, int, set[int], int]] = []  # freed: as below, with other streams
        self.own: list[tuple[int, int, int, int]] = []  # freed: address, size, stream, synchronizes
        self.graphs: dict[tuple[int, int], int] = {}  # begins without release
        self.kept: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.begun: tuple[tuple[int, int], int] | None = None
        self.graph_of: dict[int, int] = {}

    def synchronizes(self) -> int:
        return self.device.counts().synchronizes

    def check_fresh(self, address: int, size: int, stream: int, graph: tuple[int, int] | None) -> None:
        def apart(other: int, length: int) -> bool:
            return address + size <= other or other + length <= address

        assert all(apart(other, length) for other, (length, _) in self.live.items())
        for other, length, streams, then in self.busy:
            assert apart(other, length) or not streams or self.synchronizes() > then, "in use"
        for name, ranges in self.kept.items():
            assert name == graph or all(apart(*one) for one in ranges), "a graph's memory"
        for other, length, owner, then in self.own:
            assert apart(other, length) or owner == stream or self.synchronizes() > then, "another stream's"

    @rule(size=SIZES, stream=st.sampled_from([0, 1, 5]))
    def allocate(self, size: int, stream: int) -> None:
        address = self.client.allocate(size, stream)
        if address == 0:
            return
        graph = self.begun[0] if self.begun is not None and self.begun[1] == stream else None
        self.check_fresh(address, size, stream, graph)
        if graph is not None:
            self.kept[graph].append((address, size))
        self.graph_of[address] = 0 if graph is None else graph[1]
        self.live[address] = size, stream

    @precondition(lambda self: self.live)
    @rule(data=st.data(), stream=st.sampled_from([1, 5, 7, 8]))
    def use(self, data: st.DataObject, stream: int) -> None:
        address = data.draw(st.sampled_from(sorted(self.live)))
        assert self.client.use(address, stream) == (stream != self.live[address][1])
        if stream != self.live[address][1]:
            self.uses.setdefault(address, set()).add(stream)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), abroad=st.sampled_from([None, None, 1, 5]))
    def free(self, data: st.DataObject, abroad: int | None) -> None:
        address = data.draw(st.sampled_from(sorted(self.live)))
        size, stream = self.live.pop(address)
        if size > 512:  # pages of small ones go from stream to stream by events
            self.own.append((address, size, stream, self.synchronizes()))
        uses = self.uses.pop(address, set())
        if abroad not in (None, stream):
            uses.add(abroad)
        self.busy.append((address, size, uses, self.synchronizes()))
        assert self.client.free(address, stream if abroad is None else abroad)

    @rule(stream=st.sampled_from([1, 5, 7, 8]))
    def finish(self, stream: int) -> None:
        """Finish all earlier frees, except those during a capture, which have no events yet."""
        self.device.finish(stream)
        for _, _, streams, _ in self.busy[: self.with_events]:
            streams.discard(stream)

    @precondition(lambda self: self.begun is None)
    @rule(number=st.integers(1, 2), stream=st.sampled_from([1, 5]))
    def begin(self, number: int, stream: int) -> None:
        name = (0, number)
        self.pool.begin_graph(name, [stream])
        self.device.capture([stream])
        self.graphs[name] = self.graphs.get(name, 0) + 1
        self.kept.setdefault(name, [])
        self.freed_at_begin = len(self.busy)
        self.begun = name, stream

    @property
    def with_events(self) -> int:
        """Return the number of freed buffers that were freed outside a capture."""
        return len(self.busy) if self.begun is None else self.freed_at_begin

    @precondition(lambda self: self.begun is not None)
    @rule()
    def end(self) -> None:
        assert self.begun is not None
        self.device.capture([])
        self.pool.end_graph(self.begun[0])
        self.begun = None

    @precondition(lambda self: self.begun is None and any(self.graphs.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, count in self.graphs.items() if count)))
        self.graphs[name] -= 1
        self.pool.release_graph(name)
        if self.graphs[name] == 0:
            del self.kept[name]

    @rule()
    def mark(self) -> None:
        self.client.mark(_core.Mark.STEP)

    @rule()
    def trim(self) -> None:
        self.pool.trim()

    @invariant()
    def the_device_was_asked_nothing_wrong(self) -> None:
        assert self.device.counts().errors == 0

    @invariant()
    def a_snapshot_agrees(self) -> None:
        """A snapshot agrees with the counters, the addresses of live buffers and the owning graphs."""
        packed_segments, packed_blocks, _ = _core.snapshot(self.pool, None)
        segments = np.frombuffer(packed_segments, list(_core.SEGMENT_FIELDS))
        blocks = np.frombuffer(packed_blocks, list(_core.BLOCK_FIELDS))
        assert int(segments["size"].sum()) == self.pool.stats()["reserved"]["current"]
        live, waiting = (blocks[blocks["state"] == _core.BLOCK_STATES.index(s)] for s in ("live", "waiting"))
        assert dict(zip(live["address"].tolist(), live["requested"].tolist(), strict=True)) == {
            address: size for address, (size, _) in self.live.items()
        }
        assert len(waiting) == self.client.stats()["deferred_blocks"]
        graph_of = dict(
            zip(live["address"].tolist(), segments["graph_low"][live["segment"]].tolist(), strict=True)
        )
        assert graph_of == {address: self.graph_of.get(address, 0) for address in self.live}

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        if self.begun is not None:
            self.end()
        for address, (_, stream) in self.live.items():
            assert self.client.free(address, stream)
        for name, count in self.graphs.items():
            for _ in range(count):
                self.pool.release_graph(name)
        for stream in (1, 5, 7, 8):
            self.device.finish(stream)
        self.pool.trim()
        assert self.pool.stats()["deferred"]["current"] == 0
        assert self.device.counts().events_alive == 0
        assert self.device.counts().committed == 0
        assert self.device.counts().errors == 0


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
