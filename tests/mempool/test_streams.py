"""Several streams, and graphs that are captured: host order is not device order."""

from __future__ import annotations

import numpy as np
import pytest
from cores import Core, pattern
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pools import run, simulated

from mempool import Pool, _core
from mempool.recording import Recording
from traces.trace import Kind

BIG = 300_000
SIZES = st.sampled_from([100, 2_000, 60_000, BIG])


@pytest.fixture
def core() -> Core:
    return Core(page=0)


class TestABufferThatAnotherStreamUses:
    """Its memory is nobody's until that stream is through."""

    @pytest.mark.parametrize("size", [100, 60_000, BIG])
    def test_waits_for_it(self, core: Core, size: int) -> None:
        """Small, shared and large ones; the program's books close at once."""
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

    def test_waits_in_the_arena(self, core: Core) -> None:
        """A planned place that is still in use is occupied."""
        core.client.load(None, pattern([BIG, BIG]))
        core.step()
        first = core.allocate(BIG)
        core.client.use(first, 7)
        core.free(first)
        core.step()
        assert core.allocate(BIG) != first
        core.device.finish(7)
        core.step()
        assert core.allocate(BIG) == first

    def test_waits_for_each_of_several_streams(self, core: Core) -> None:
        """The last one decides."""
        core.pool.set_retained_limit(1 << 40)
        first = core.allocate(BIG)
        for stream in (7, 8, 7):
            core.client.use(first, stream)
        core.free(first)
        for stream in (8, 7):
            assert core.pool.stats()["deferred"]["current"] > 0
            core.device.finish(stream)
            core.step()
        assert core.pool.stats()["deferred"]["current"] == 0
        assert core.device.counts().events_alive == 0

    def test_is_had_back_before_memory_runs_out(self) -> None:
        """Waiting for the device is better than an error."""
        core = Core(page=0, capacity=3 * BIG)
        first = core.allocate(2 * BIG)
        core.client.use(first, 7)
        core.free(first)
        core.allocate(2 * BIG)
        assert core.device.counts().synchronizes > 0

    def test_is_freed_once(self, core: Core) -> None:
        """A second free finds nothing alive, also while the memory waits."""
        first = core.allocate(BIG)
        core.client.use(first, 7)
        core.free(first)
        assert not core.client.free(first)
        assert not core.client.use(first, 8)
        assert core.client.stats()["double_frees"] == 1

    def test_its_own_stream_is_none(self, core: Core) -> None:
        """Nor is a use of what is not ours."""
        first = core.allocate(BIG, 3)
        assert not core.client.use(first, 3)
        assert not core.client.use(first + 64, 4)
        core.free(first, 3)
        assert core.pool.stats()["deferred"]["current"] == 0

    def test_is_left_out_of_the_plan(self) -> None:
        """Nobody knows when the stream is through; the rest hits."""
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
            assert outcomes["occupied"] == 0, steady

    def test_is_in_the_trace(self) -> None:
        """As a read by that stream, between its alloc and its free; of later buffers there, theirs."""
        pool = _core.Pool(device=simulated(page=0))
        client = _core.Client(pool, "test")
        client.set_tape(True)
        client.set_recording(True)
        pool.set_retained_limit(1 << 40)
        first = client.allocate(BIG, 1)
        client.use(first, 7)
        client.free(first, 1)
        pool.trim()
        second = client.allocate(BIG, 1)
        client.use(second, 8)
        recording = Recording(64)
        packed, streams, *_ = client.recording()
        tape = client.take_tape()
        client.use(second, 9)
        for trace in (recording.trace(tape), Recording(64).brief(packed, streams)):
            trace.validate()
            reads = np.flatnonzero(trace.kind == Kind.READ)
            assert trace.stream[reads].tolist() == [7, 8]
            assert trace.buffer[reads].tolist() == [0, 1]
        later = recording.trace(client.take_tape())
        assert (later.kind.tolist(), later.buffer.tolist(), later.stream.tolist()) == ([Kind.READ], [1], [9])


class TestABufferThatAnotherStreamFrees:
    """It is its own stream's again when that one has come past the free; neither waits for the other."""

    @pytest.mark.parametrize("used_too", [False, True])
    @pytest.mark.parametrize("size", [100, 60_000, BIG])
    def test_waits_for_that_one(self, core: Core, size: int, used_too: bool) -> None:
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
    def test_does_not_pile_up(self, core: Core, size: int) -> None:
        """Nor where the other one has memory of its own here."""
        core.pool.set_retained_limit(1 << 40)
        own = core.allocate(size, 5)
        for _ in range(200):
            address = core.allocate(size, 1)
            core.free(address, 5)
            core.device.finish(5)
        core.free(own, 5)
        assert core.pool.stats()["reserved"]["peak"] <= max(4 * size, 4 << 20)
        assert core.device.counts().synchronizes == 0

    def test_is_gone_with_it_where_the_host_has_to_wait_for_memory(self) -> None:
        core = Core(page=0, capacity=3 * BIG, shared=BIG)
        for _ in range(20):
            core.free(core.allocate(BIG, 1), 5)
        assert core.client.stats()["out_of_memory"] == 0


class TestACapturedGraph:
    """Its memory is its own for as long as it can be replayed."""

    def test_keeps_its_memory_until_it_is_released(self, core: Core) -> None:
        """Freed inside or after the capture, nobody else gets it."""
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

    def test_uses_its_own_memory_again(self, core: Core) -> None:
        """Within one capture, and in a later one of the same pool; once for each begin it is released."""
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

    def test_outlived_by_a_buffer_it_stays_until_that_is_freed(self, core: Core) -> None:
        """The graph's result is a tensor like any other."""
        core.pool.begin_graph((0, 1), [5])
        result = core.allocate(BIG, 5)
        core.pool.end_graph((0, 1))
        core.pool.release_graph((0, 1))
        assert core.pool.stats()["graph_pools"] == 1
        core.free(result, 5)
        core.give_everything_back()

    def test_keeps_what_is_free_of_it_where_more_is_held_than_the_budget(self, core: Core) -> None:
        """Replays use it again, and a free of its result gives none of it back."""
        core.pool.begin_graph((0, 1), [5])
        result = core.allocate(BIG, 5)
        core.free(core.allocate(2 * BIG, 5), 5)
        core.pool.end_graph((0, 1))
        core.pool.set_budget(BIG)
        reserved = core.pool.stats()["reserved"]["current"]
        core.free(result, 5)
        assert core.pool.stats()["reserved"]["current"] == reserved
        core.pool.release_graph((0, 1))
        core.give_everything_back()

    def test_takes_nothing_from_the_plan(self, core: Core) -> None:
        """What is allocated while one is captured is outside, and the iteration goes on behind it."""
        core.client.load(None, pattern([BIG, BIG]))
        core.step()
        first = core.allocate(BIG)
        core.pool.begin_graph((0, 1), [0])
        inside = core.allocate(BIG)
        core.pool.end_graph((0, 1))
        core.free(first)
        core.allocate(BIG)
        assert (core.hits, core.misses) == (2, 0)
        assert core.outcomes["outside"] == 1
        core.free(inside)

    def test_is_not_spoilt_by_memory_that_runs_out(self) -> None:
        """Nothing goes back, and nobody waits for the device; afterwards both."""
        core = Core(page=0, capacity=4 * BIG)
        core.pool.set_retained_limit(1 << 40)
        core.free(core.allocate(2 * BIG))
        core.pool.begin_graph((0, 1), [5])
        core.device.capture([5])
        assert core.client.allocate(3 * BIG) == 0
        assert core.device.counts().errors == 0
        core.device.capture([])
        core.pool.end_graph((0, 1))
        core.allocate(3 * BIG)

    def test_is_not_joined_by_a_small_request(self, core: Core) -> None:
        """A page that the captured stream used is nobody else's: to wait for that stream is forbidden."""
        core.free(core.allocate(100, 5), 5)
        core.allocate(100, 2)  # keeps the region
        core.pool.trim()
        core.pool.begin_graph((0, 1), [5])
        core.device.capture([5])
        core.allocate(100, 0)
        assert core.device.counts().errors == 0

    @pytest.mark.parametrize("change", ["release", "drop", "move", "resize"])
    def test_is_not_spoilt_by_the_arena(self, change: str) -> None:
        """It is not given back, made smaller or taken by another stream, nor is a segment resized."""
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
    """No memory is handed out that a stream may still be at work on, and no capture is spoilt."""

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
        """All that was freed before this, but what was while a graph is captured: that has no events yet."""
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
        """How many of those freed were freed outside a capture."""
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
        """With the books, with what lives where, and with which graph it is of."""
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
TestStreams.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
