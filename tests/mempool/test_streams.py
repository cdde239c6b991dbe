"""Several streams, and captured graphs: host order is not device order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cores import Core, pattern
from pools import run, simulated
from programs import Watched

from mempool import Pool, _core
from mempool.recording.events import EventConverter
from solvers import check, peak_load
from solvers.packing.streams import waits
from traces.trace import EventType

BIG = 300_000


@pytest.fixture
def core() -> Core:
    return Core(page=0)


class TestABufferThatAnotherStreamUses:
    """A buffer used by another stream: the memory is reused only after that stream has finished."""

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


SIZES = [4096, 8192, 1024, 2048]
APART = [0, 4096, 12288, 13312]
BYTES = sum(SIZES)


def two_streams(*, shared: bool, order: tuple[int, int] = (0, 5)) -> _core.Pattern:
    """Plans of stream 0 and stream 5 with equal sizes, at the same addresses or behind each other."""
    offsets = APART if shared else [BYTES + offset for offset in APART]
    first, second = order
    return pattern(SIZES, APART, stream=first, others=[(1, second, SIZES, offsets)])


def wait_count(core: Core) -> int:
    count: int = core.pool.stats()["stream_waits"]
    return count


@pytest.mark.parametrize("page", [0, 4096])
def test_streams_take_turns_with_the_same_addresses(page: int) -> None:
    core = Core(page=page)
    core.client.load(None, two_streams(shared=True))
    for _ in range(10):
        core.step()
        assert core.run(SIZES) == 4
        assert core.run(SIZES, stream=5) == 4
    assert core.misses == 0
    assert core.device.counts().committed <= max(BYTES, 4 * page + BYTES)
    # The other's buffers were freed last to first: the wait for the first place covers all of them.
    assert wait_count(core) >= 2 * 10 - 1
    core.give_everything_back()


def test_streams_without_shared_addresses_do_not_wait_and_a_single_stream_has_no_events() -> None:
    core = Core()
    core.client.load(None, two_streams(shared=False))
    for iteration in range(10):
        core.step()
        assert core.run(SIZES) + core.run(SIZES, stream=5) == 8
        if iteration == 0:
            first = wait_count(core)  # earlier work of the first stream is unobserved
    assert wait_count(core) == first <= 1
    assert core.device.counts().events_alive <= 1
    core.give_everything_back()
    core = Core()
    core.client.load(None, pattern(SIZES, APART, stream=7))
    assert core.run(SIZES, stream=7) == 4
    assert (wait_count(core), core.device.counts().events_alive) == (0, 0)


def test_live_events_are_bounded() -> None:
    """Frees in shared slots record an event each; events without a waiter are forgotten."""
    core = Core()
    core.client.load(None, two_streams(shared=True))
    core.step()
    core.run(SIZES, stream=5)
    for _ in range(200):
        core.step()
        assert core.run(SIZES) == 4
    assert 0 < core.device.counts().events_alive <= 2 * 32
    core.give_everything_back()
    assert core.device.counts().events_alive == 0


@pytest.mark.parametrize("late", [False, True])
def test_plan_of_another_process_maps_streams_by_their_first_allocations(late: bool) -> None:
    """Stream handles have no meaning in another process."""
    core = Core()
    if late:
        core.run([1000], stream=111)
        core.run([1000], stream=222)
    core.client.load(None, two_streams(shared=True, order=(31, 47)))
    before = core.misses
    for _ in range(3):
        assert core.run(SIZES, stream=111) + core.run(SIZES, stream=222) == 8
    assert core.misses == before
    core.give_everything_back()


def test_streams_beyond_the_number_of_tracked_streams_are_served() -> None:
    core = Core()
    streams = range(20)
    others = [(k, k, SIZES, APART) for k in streams[1:]]
    core.client.load(None, pattern(SIZES, APART, others=others))
    for _ in range(3):
        for stream in streams:
            assert core.run(SIZES, stream=stream) == (4 if stream < 15 else 0)
    assert core.outcomes["other_stream"] == 3 * 4 * 5
    core.give_everything_back()


def test_holes_of_an_arena_are_anothers_only_when_memory_runs_out() -> None:
    core = Core(page=0, capacity=1 << 20)
    core.client.load(None, pattern([512 << 10, 1024]))
    core.run([512 << 10, 1024])
    core.client.enter_dynamic()
    core.allocate(400 << 10, 5)
    assert core.arena_live_ranges == 0
    core.allocate(400 << 10, 5)
    assert core.arena_live_ranges == 1
    assert wait_count(core) == 1


def test_pool_without_stream_sharing_waits_for_the_device_instead() -> None:
    """Once, for the first stream's frees before the second appeared; with shared addresses rarely."""
    core = Core(share_streams=False)
    core.client.load(None, two_streams(shared=False))
    for _ in range(10):
        core.step()
        assert core.run(SIZES) + core.run(SIZES, stream=5) == 8
    assert wait_count(core) == core.device.counts().synchronizes == 1
    assert core.device.counts().events_alive == 0
    core = Core(share_streams=False)
    core.client.load(None, two_streams(shared=True))
    for _ in range(300):
        core.step()
        core.run(SIZES)
        core.run(SIZES, stream=5)
    assert 1 < wait_count(core) < 8
    assert core.outcomes["other_stream"] > 1000
    core.give_everything_back()


KIB = 1 << 10
COMPUTE, COPY = 0, 7


class TwoStreams(Watched):
    """Layers on one stream, with another stream that gathers and scatters buckets between them."""

    copy = COPY

    def iteration(self, _: int) -> None:
        for layer in range(8):
            self.free(self.allocate(256 * KIB, self.copy), self.copy)
            work = [self.allocate((20 + 10 * k + layer) * KIB, COMPUTE) for k in range(6)]
            for address in reversed(work):
                self.free(address, COMPUTE)


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize(("wait_bytes", "shares"), [(0, True), ("1GiB", False), ("never", False)])
def test_plan_of_several_streams_predicts_waits_and_misses(
    wait_bytes: int | str, shares: bool, marks: bool
) -> None:
    with Pool(simulated(), background=False, wait_bytes=wait_bytes) as pool:
        program = TwoStreams(pool)
        run(pool, program.iteration, 12, marks=marks)
        assert pool.planned is not None
        plan, buffers = pool.planned.plan, pool.planned.buffers
        check(plan, buffers)
        assert set(buffers.stream.tolist()) == {COMPUTE, COPY}
        apart = sum(peak_load(buffers.select((buffers.stream == s).nonzero()[0])) for s in (COMPUTE, COPY))
        assert (plan.arena_bytes < apart * 0.9) == shares
        expected = waits(plan, buffers)
        assert (expected > 0) == shares
        before, misses = pool.core.stats()["stream_waits"], pool.report().to_dict()["misses"]
        run(pool, program.iteration, 10, marks=marks)
        assert pool.core.stats()["stream_waits"] - before == 10 * expected
        assert pool.report().to_dict()["misses"] == misses


def test_saved_plan_of_several_streams_serves_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "p.plan"
    with Pool(simulated(), background=False, wait_bytes=0) as pool:
        run(pool, TwoStreams(pool).iteration, 12, marks=True)
        pool.save(path)
    with Pool(simulated(), background=False, plan=str(path)) as pool:
        program = TwoStreams(pool)
        program.copy = 123
        run(pool, program.iteration, 6, marks=True)
        said = pool.report().to_dict()
        confirming = 6  # the first stream's allocations until the program is known to follow the plan
        assert said["hits"] == 6 * 8 * 7 - confirming
        assert said["misses"] == 0
