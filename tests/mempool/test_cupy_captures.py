"""Graphs captured by CuPy, on the fake driver.

Stand-ins replace CuPy's streams, which cannot reach the fake.
"""

from __future__ import annotations

import functools
import gc
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
runtime = pytest.importorskip("cupy.cuda.runtime")

from cupy_platform import Current, FakePlatform, install  # noqa: E402
from fake_cuda import RELAXED, THREAD_LOCAL, eventually, on_another_thread  # noqa: E402

import mempool.cupy  # noqa: E402
from mempool import OutOfMemoryError, UsageError, _core  # noqa: E402
from mempool.cupy import captures  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fake_cuda import FakeCuda

    from mempool.cupy import CupyPool

KIB, MIB = 1 << 10, 1 << 20


@dataclass
class Stream:
    """A stream of the fake driver, with the methods of CuPy's class."""

    ptr: int

    def begin_capture(self, mode: int = 0) -> None:
        cupy.cuda.Stream.begin_capture(self, mode)

    def end_capture(self) -> int:
        return cupy.cuda.Stream.end_capture(self)


@pytest.fixture
def stream(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Stream:
    def begin(stream: Any, mode: int = 0) -> None:
        if fake.is_captured(stream.ptr):
            raise RuntimeError("cudaErrorIllegalState")
        fake.begin_capture(stream.ptr, mode)

    for kind in (cupy.cuda.Stream, cupy.cuda.ExternalStream):
        monkeypatch.setattr(kind, "begin_capture", begin, raising=False)
        monkeypatch.setattr(kind, "end_capture", lambda stream: fake.end_capture(stream.ptr), raising=False)
    monkeypatch.setattr(runtime, "streamBeginCapture", fake.begin_capture)
    monkeypatch.setattr(runtime, "streamEndCapture", fake.end_capture)
    return Stream(fake.stream())


@pytest.fixture
def pool(current: Current, fake: FakeCuda, stream: Stream) -> Iterator[CupyPool]:
    with install(FakePlatform(current, fake.device)) as made:
        yield made
        made.release_graphs()
    assert not captures._with_graphs


def array(size: int = 64 * KIB) -> Any:
    return cupy.ndarray((size,), "u1")


def span(one: Any) -> range:
    return range(one.data.ptr, one.data.ptr + one.nbytes)


def test_memory_given_to_a_graph_serves_no_later_array(
    pool: CupyPool, stream: Stream, current: Current, fake: FakeCuda
) -> None:
    """Even long after the graph's arrays are freed, and on the same stream."""
    with current.on(stream=stream.ptr):
        kept = array()
        stream.begin_capture()
        temporary, output = array(), array()
        graphs = [span(temporary), span(output)]
        del temporary
        assert not fake.is_broken(stream.ptr)
        assert stream.end_capture() >= 0
        del output
        later = [array() for _ in range(1000)]
        assert not any(one.data.ptr in graph for graph in graphs for one in later)
        del later, kept
        pool.free_all_blocks()
        later = [array() for _ in range(1000)]
        assert not any(one.data.ptr in graph for graph in graphs for one in later)
        del later
        held = pool.total_bytes()
        pool.release_graphs()
        assert pool.total_bytes() < held


def test_iteration_captured_during_replay_ignores_its_plan(
    pool: CupyPool, stream: Stream, current: Current, fake: FakeCuda
) -> None:
    """The iteration follows the plan again after the capture."""
    with current.on(stream=stream.ptr):

        def iteration(*, capture: bool = False) -> None:
            pool.step()
            first = array(100_000)
            if capture:
                stream.begin_capture()
            second = array(200_000)
            del first
            third = array(300_000)
            del second, third

        for _ in range(8):
            iteration()
            pool.plan_now()
        pool.pool(0).client.set_recording(False)  # so that hits go the straight way
        iteration()
        hits = pool.report().to_dict()["hits_total"]
        iteration(capture=True)
        assert pool.report().to_dict()["hits_total"] == hits + 1
        assert not fake.is_broken(stream.ptr)
        assert stream.end_capture() >= 0
        for _ in range(4):
            iteration()
        assert pool.report().to_dict()["hits_total"] >= hits + 9


def test_other_streams_go_on_during_a_capture(
    pool: CupyPool, stream: Stream, current: Current, fake: FakeCuda
) -> None:
    with current.on(stream=fake.stream()):
        before = array(30 * MIB)
        stream.begin_capture()
        del before
        there = array(30 * MIB)
        fake.write(current_stream := fake.stream(), there.data.ptr, 8, 1)
        fake.finish(current_stream)
    here = array()
    del here, there
    pool.free_all_blocks()  # keeps what it would have to wait for
    assert not fake.is_broken(stream.ptr)
    assert stream.end_capture() >= 0
    pool.free_all_blocks()
    assert pool.used_bytes() == 0


def test_stream_joining_a_capture_is_part_of_the_capture(
    pool: CupyPool, stream: Stream, current: Current, fake: FakeCuda
) -> None:
    side = fake.stream()
    stream.begin_capture()
    fake.fork(stream.ptr, side)
    with current.on(stream=side):
        one = array()
        where = one.data.ptr
        del one
    calls = _core.DeviceCalls(fake.device())
    context = calls.reserve(512)  # makes one
    joined = calls.record(side)
    assert calls.wait(stream.ptr, joined)
    calls.forget(joined)
    calls.release(context, 512)
    assert stream.end_capture() >= 0
    with current.on(stream=side):
        assert array().data.ptr != where


def test_out_of_memory_within_a_capture_does_not_break_the_capture(
    pool: CupyPool, stream: Stream, current: Current, fake: FakeCuda
) -> None:
    """CuPy's own pool, which would have to return memory, is not asked meanwhile."""

    class Earlier:
        calls = 0

        def free_all_blocks(self) -> None:
            self.calls += 1

    earlier, plain = Earlier(), pool._earlier
    pool._earlier = earlier
    fake.set_capacity(30 * MIB)
    with current.on(stream=stream.ptr):
        stream.begin_capture()
        with pytest.raises(OutOfMemoryError):
            array(50 * MIB)
        assert earlier.calls == 0
        one = array()
        assert not fake.is_broken(stream.ptr)
        assert stream.end_capture() >= 0
        with pytest.raises(OutOfMemoryError):
            array(50 * MIB)
        assert earlier.calls == 1
        assert one.data.ptr != 0
    pool._earlier = plain


def test_failed_begin_of_a_capture_changes_nothing(
    pool: CupyPool, stream: Stream, current: Current, fake: FakeCuda
) -> None:
    stream.begin_capture()
    with pytest.raises(RuntimeError, match="cudaErrorIllegalState"):
        stream.begin_capture()
    assert pool._captures.going_on(pool.pool(0).core)
    assert stream.end_capture() >= 0
    fake.begin_capture(stream.ptr)  # by somebody else
    with pytest.raises(RuntimeError, match="cudaErrorIllegalState"):
        stream.begin_capture()
    assert not pool._captures.going_on(pool.pool(0).core)
    fake.end_capture(stream.ptr)
    with current.on(stream=stream.ptr):
        freed = array().data.ptr
        assert array().data.ptr == freed


def test_pool_is_not_released_within_a_capture(pool: CupyPool, stream: Stream) -> None:
    stream.begin_capture()
    with pytest.raises(UsageError, match=r"being captured: end_capture\(\) first"):
        mempool.cupy.uninstall()
    assert mempool.cupy.is_installed()
    assert stream.end_capture() >= 0


def test_graph_keeps_its_memory_after_the_pool_is_closed(
    current: Current, fake: FakeCuda, stream: Stream
) -> None:
    pool = install(FakePlatform(current, fake.device))
    with current.on(stream=stream.ptr):
        stream.begin_capture()
        one = array()
        address = one.data.ptr
        fake.write(stream.ptr, address, 64 * KIB, 7)
        graph = stream.end_capture()
    pool.close()
    del one, pool
    gc.collect()
    assert _core.live_objects()["pools"] == 1
    fake.launch(graph, stream.ptr)
    fake.expect(stream.ptr, address, 64 * KIB, 7)
    fake.finish(stream.ptr)
    fake.destroy_graph(graph)
    captures._with_graphs.clear()


def test_two_threads_capture_their_own_default_streams(
    pool: CupyPool, stream: Stream, current: Current, fake: FakeCuda
) -> None:
    """Both streams have the same handle: the end of one capture does not end the other."""
    one_began, other_ended = threading.Event(), threading.Event()
    graphs: list[int] = []
    spans: list[range] = []

    def temporary() -> None:
        spans.append(span(array()))

    def one() -> None:
        current.set(stream=2)
        mine = Stream(2)
        mine.begin_capture(THREAD_LOCAL)
        one_began.set()
        other_ended.wait()
        temporary()
        pool.free_all_blocks()  # keeps what it would have to wait for
        graphs.append(mine.end_capture())
        temporary()

    def other() -> None:
        one_began.wait()
        current.set(stream=2)
        mine = Stream(2)
        mine.begin_capture(THREAD_LOCAL)
        temporary()
        graphs.append(mine.end_capture())
        temporary()
        other_ended.set()

    threads = [threading.Thread(target=work) for work in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(graph >= 0 for graph in graphs)
    assert len({where.start for where in spans}) == 4


def test_concurrent_captures_have_separate_memory(
    pool: CupyPool, stream: Stream, current: Current, fake: FakeCuda
) -> None:
    """Released graphs take nothing from a capture in progress."""
    other = Stream(fake.stream())
    stream.begin_capture(RELAXED)
    other.begin_capture(RELAXED)
    with current.on(stream=other.ptr):
        temporary = array(30 * MIB)
        where = span(temporary)
        fake.write(other.ptr, where.start, 64, 7)
        del temporary
    fake.destroy_graph(stream.end_capture())
    pool.release_graphs()
    graph = other.end_capture()
    pool.free_all_blocks()
    assert not any(one.data.ptr in where for one in [array(30 * MIB) for _ in range(4)])
    fake.launch(graph, other.ptr)
    fake.finish(other.ptr)
    fake.destroy_graph(graph)


@pytest.mark.parametrize("joins", [False, True])
def test_streams_of_another_gpu_may_be_captured(
    pool: CupyPool, stream: Stream, current: Current, fake: FakeCuda, joins: bool
) -> None:
    """The current GPU at the beginning does not matter, nor does an existing pool."""
    far = Stream(fake.stream(fake.primary(1)))
    with current.on(stream=stream.ptr):
        array()
    if joins:
        with current.on(1, far.ptr):
            array()
    origin = stream if joins else far
    origin.begin_capture()
    if joins:
        fake.fork(stream.ptr, far.ptr)
    with current.on(1, far.ptr):
        one = array()
        where = span(one)
        del one
        pool.free_all_blocks()
        assert not fake.is_broken(far.ptr)
        assert origin.end_capture() >= 0
        assert array().data.ptr not in where


def test_pool_made_during_a_capture_is_part_of_the_capture(
    pool: CupyPool, stream: Stream, current: Current, fake: FakeCuda
) -> None:
    stream.begin_capture()
    assert list(pool.pools) == [0]
    with current.on(1):
        array()
    assert all(pool._captures.going_on(one.core) for one in pool.pools.values())
    assert stream.end_capture() >= 0
    assert not any(pool._captures.going_on(one.core) for one in pool.pools.values())


@pytest.mark.parametrize("ends", [True, False])
def test_error_within_a_capture_reaches_the_program(
    current: Current, fake: FakeCuda, stream: Stream, ends: bool
) -> None:
    """The pool is released when the capture is over: at the regular end, or once the stream is destroyed."""
    begin = cupy.cuda.Stream.begin_capture
    pool = install(FakePlatform(current, fake.device))
    one = Stream(stream.ptr)

    def capture_badly(pool: CupyPool, one: Stream) -> None:
        with pool:
            one.begin_capture()
            raise ValueError("the program's own")

    with pytest.raises(ValueError, match="own"):
        capture_badly(pool, one)
    assert not mempool.cupy.is_installed()
    assert cupy.cuda.Stream.begin_capture is not begin
    assert pool._captures.going_on(pool.pool(0).core)
    end = one.end_capture if ends else functools.partial(fake.end_capture, one.ptr)
    assert end() >= 0
    del one, end
    gc.collect()
    assert cupy.cuda.Stream.begin_capture is begin
    assert not captures._going_on
    pool.release_graphs()
    with install(FakePlatform(current, fake.device)) as pool:
        array(30 * MIB)
        pool.free_all_blocks()
        assert pool.total_bytes() == 0


def test_capture_ends_with_the_thread_of_its_default_stream(
    pool: CupyPool, stream: Stream, current: Current
) -> None:
    core = pool.pool(0).core

    def begin() -> bool:
        current.set(stream=2)
        runtime.streamBeginCapture(2, THREAD_LOCAL)
        return on_another_thread(lambda: pool._captures.going_on(core))

    assert on_another_thread(begin)
    assert eventually(lambda: not pool._captures.going_on(core))


def test_captures_of_cupys_runtime_functions_are_seen(
    pool: CupyPool, stream: Stream, current: Current, fake: FakeCuda
) -> None:
    with current.on(stream=stream.ptr):
        runtime.streamBeginCapture(stream.ptr, RELAXED)
        one = array()
        where = span(one)
        del one
        assert runtime.streamEndCapture(stream.ptr) >= 0
        assert array().data.ptr not in where
