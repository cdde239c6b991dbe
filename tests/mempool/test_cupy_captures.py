"""Graphs captured by CuPy, on the fake driver.

Stand-ins replace CuPy's streams, which cannot reach the fake.
"""

from __future__ import annotations

import functools
import gc
import threading
from dataclasses import dataclass, replace
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
    from contextlib import AbstractContextManager

    from fake_cuda import FakeCuda

    from mempool.cupy import CupyPool

KIB, MIB = 1 << 10, 1 << 20


@dataclass
class Stream:
    """A stream of the fake driver, with the methods of CuPy's class."""

    ptr: int
    fake: FakeCuda
    current: Current

    def on(self) -> AbstractContextManager[None]:
        return self.current.on(stream=self.ptr)

    def begin_capture(self, mode: int = 0) -> None:
        cupy.cuda.Stream.begin_capture(self, mode)

    def end_capture(self) -> int:
        return cupy.cuda.Stream.end_capture(self)


@pytest.fixture
def stream(fake: FakeCuda, current: Current, monkeypatch: pytest.MonkeyPatch) -> Stream:
    def begin(stream: Any, mode: int = 0) -> None:
        if fake.is_captured(stream.ptr):
            raise RuntimeError("cudaErrorIllegalState")
        fake.begin_capture(stream.ptr, mode)

    for kind in (cupy.cuda.Stream, cupy.cuda.ExternalStream):
        monkeypatch.setattr(kind, "begin_capture", begin, raising=False)
        monkeypatch.setattr(kind, "end_capture", lambda stream: fake.end_capture(stream.ptr), raising=False)
    monkeypatch.setattr(runtime, "streamBeginCapture", fake.begin_capture)
    monkeypatch.setattr(runtime, "streamEndCapture", fake.end_capture)
    return Stream(fake.stream(), fake, current)


@pytest.fixture
def pool(stream: Stream) -> Iterator[CupyPool]:
    with install(FakePlatform(stream.current, stream.fake.device)) as made:
        yield made
        made.release_graphs()
    assert not captures._with_graphs


def array(size: int = 64 * KIB) -> Any:
    return cupy.ndarray((size,), "u1")


def captured(pool: CupyPool) -> list[bool]:
    """Return whether a capture is going on for each device's pool."""
    return [pool._captures.going_on(one.core) for one in pool.pools.values()]


def span(one: Any) -> range:
    return range(one.data.ptr, one.data.ptr + one.nbytes)


def test_memory_given_to_a_graph_serves_no_later_array(pool: CupyPool, stream: Stream) -> None:
    """Even long after the graph's arrays are freed, and on the same stream."""
    with stream.on():
        kept = array()
        stream.begin_capture()
        temporary, output = array(), array()
        graphs = [span(temporary), span(output)]
        del temporary
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


def test_iteration_captured_during_replay_ignores_its_plan(pool: CupyPool, stream: Stream) -> None:
    """The iteration follows the plan again after the capture."""
    with stream.on():

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
        assert stream.end_capture() >= 0
        for _ in range(4):
            iteration()
        assert pool.report().to_dict()["hits_total"] >= hits + 9


def test_other_streams_go_on_during_a_capture(pool: CupyPool, stream: Stream) -> None:
    with stream.current.on(stream=stream.fake.stream()):
        before = array(30 * MIB)
        stream.begin_capture()
        del before
        there = array(30 * MIB)
        stream.fake.write(current_stream := stream.fake.stream(), there.data.ptr, 8, 1)
        stream.fake.finish(current_stream)
    here = array()
    del here, there
    pool.free_all_blocks()  # keeps what it would have to wait for
    assert stream.end_capture() >= 0
    pool.free_all_blocks()
    assert pool.used_bytes() == 0


def test_stream_joining_a_capture_is_part_of_the_capture(pool: CupyPool, stream: Stream) -> None:
    side = stream.fake.stream()
    stream.begin_capture()
    stream.fake.fork(stream.ptr, side)
    with stream.current.on(stream=side):
        one = array()
        where = one.data.ptr
        del one
    calls = _core.DeviceCalls(stream.fake.device())
    context = calls.reserve(512)  # makes one
    joined = calls.record(side)
    assert calls.wait(stream.ptr, joined)
    calls.forget(joined)
    calls.release(context, 512)
    assert stream.end_capture() >= 0
    with stream.current.on(stream=side):
        assert array().data.ptr != where


def test_out_of_memory_within_a_capture_does_not_break_the_capture(
    pool: CupyPool, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy's own pool, which would have to return memory, is not asked meanwhile."""

    class Earlier:
        calls = 0

        def free_all_blocks(self) -> None:
            self.calls += 1

    earlier = Earlier()
    monkeypatch.setattr(pool, "_earlier", earlier)
    stream.fake.set_capacity(30 * MIB)
    with stream.on():
        stream.begin_capture()
        with pytest.raises(OutOfMemoryError):
            array(50 * MIB)
        assert earlier.calls == 0
        one = array()
        assert stream.end_capture() >= 0
        with pytest.raises(OutOfMemoryError):
            array(50 * MIB)
        assert earlier.calls == 1
        assert one.data.ptr != 0


def test_failed_begin_of_a_capture_changes_nothing(pool: CupyPool, stream: Stream) -> None:
    stream.begin_capture()
    with pytest.raises(RuntimeError, match="cudaErrorIllegalState"):
        stream.begin_capture()
    assert captured(pool) == [True]
    assert stream.end_capture() >= 0
    stream.fake.begin_capture(stream.ptr)  # by somebody else
    with pytest.raises(RuntimeError, match="cudaErrorIllegalState"):
        stream.begin_capture()
    assert captured(pool) == [False]
    stream.fake.end_capture(stream.ptr)
    with stream.on():
        freed = array().data.ptr
        assert array().data.ptr == freed


def test_pool_is_not_released_within_a_capture(pool: CupyPool, stream: Stream) -> None:
    stream.begin_capture()
    with pytest.raises(UsageError, match=r"being captured: end_capture\(\) first"):
        mempool.cupy.uninstall()
    assert mempool.cupy.is_installed()
    assert stream.end_capture() >= 0


def test_graph_keeps_its_memory_after_the_pool_is_closed(stream: Stream) -> None:
    pool = install(FakePlatform(stream.current, stream.fake.device))
    with stream.on():
        stream.begin_capture()
        one = array()
        address = one.data.ptr
        stream.fake.write(stream.ptr, address, 64 * KIB, 7)
        graph = stream.end_capture()
    pool.close()
    del one, pool
    gc.collect()
    assert _core.live_objects()["pools"] == 1
    stream.fake.launch(graph, stream.ptr)
    stream.fake.expect(stream.ptr, address, 64 * KIB, 7)
    stream.fake.finish(stream.ptr)
    stream.fake.destroy_graph(graph)
    captures._with_graphs.clear()


def test_two_threads_capture_their_own_default_streams(pool: CupyPool, stream: Stream) -> None:
    """Both streams have the same handle: the end of one capture does not end the other."""
    one_began, other_ended = threading.Event(), threading.Event()
    graphs: list[int] = []
    spans: list[range] = []

    def temporary() -> None:
        spans.append(span(array()))

    def one() -> None:
        stream.current.set(stream=2)
        mine = replace(stream, ptr=2)
        mine.begin_capture(THREAD_LOCAL)
        one_began.set()
        other_ended.wait()
        temporary()
        pool.free_all_blocks()  # keeps what it would have to wait for
        graphs.append(mine.end_capture())
        temporary()

    def other() -> None:
        one_began.wait()
        stream.current.set(stream=2)
        mine = replace(stream, ptr=2)
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


def test_concurrent_captures_have_separate_memory(pool: CupyPool, stream: Stream) -> None:
    """Released graphs take nothing from a capture in progress."""
    other = replace(stream, ptr=stream.fake.stream())
    stream.begin_capture(RELAXED)
    other.begin_capture(RELAXED)
    with other.on():
        temporary = array(30 * MIB)
        where = span(temporary)
        stream.fake.write(other.ptr, where.start, 64, 7)
        del temporary
    stream.fake.destroy_graph(stream.end_capture())
    pool.release_graphs()
    graph = other.end_capture()
    pool.free_all_blocks()
    assert not any(one.data.ptr in where for one in [array(30 * MIB) for _ in range(4)])
    stream.fake.launch(graph, other.ptr)
    stream.fake.finish(other.ptr)
    stream.fake.destroy_graph(graph)


@pytest.mark.parametrize("joins", [False, True])
def test_streams_of_another_gpu_may_be_captured(pool: CupyPool, stream: Stream, joins: bool) -> None:
    """The current GPU at the beginning does not matter, nor does an existing pool."""
    far = replace(stream, ptr=stream.fake.stream(stream.fake.primary(1)))
    with stream.on():
        array()
    if joins:
        with stream.current.on(1, far.ptr):
            array()
    origin = stream if joins else far
    origin.begin_capture()
    if joins:
        stream.fake.fork(stream.ptr, far.ptr)
    with stream.current.on(1, far.ptr):
        one = array()
        where = span(one)
        del one
        pool.free_all_blocks()
        assert origin.end_capture() >= 0
        assert array().data.ptr not in where


def test_pool_made_during_a_capture_is_part_of_the_capture(pool: CupyPool, stream: Stream) -> None:
    stream.begin_capture()
    assert list(pool.pools) == [0]
    with stream.current.on(1):
        array()
    assert all(captured(pool))
    assert stream.end_capture() >= 0
    assert not any(captured(pool))


@pytest.mark.parametrize("ends", [True, False])
def test_error_within_a_capture_reaches_the_program(stream: Stream, ends: bool) -> None:
    """The pool is released when the capture is over: at the regular end, or once the stream is destroyed."""
    begin = cupy.cuda.Stream.begin_capture
    pool = install(FakePlatform(stream.current, stream.fake.device))
    one = replace(stream)

    def capture_badly(pool: CupyPool, one: Stream) -> None:
        with pool:
            one.begin_capture()
            raise ValueError("the program's own")

    with pytest.raises(ValueError, match="own"):
        capture_badly(pool, one)
    assert not mempool.cupy.is_installed()
    assert cupy.cuda.Stream.begin_capture is not begin
    assert captured(pool) == [True]
    end = one.end_capture if ends else functools.partial(stream.fake.end_capture, one.ptr)
    assert end() >= 0
    del one, end
    gc.collect()
    assert cupy.cuda.Stream.begin_capture is begin
    assert not captures._going_on
    pool.release_graphs()
    with install(FakePlatform(stream.current, stream.fake.device)) as pool:
        array(30 * MIB)
        pool.free_all_blocks()
        assert pool.total_bytes() == 0


def test_capture_ends_with_the_thread_of_its_default_stream(pool: CupyPool, stream: Stream) -> None:
    pool.pool(0)

    def begin() -> bool:
        stream.current.set(stream=2)
        runtime.streamBeginCapture(2, THREAD_LOCAL)
        return on_another_thread(lambda: captured(pool)) == [True]

    assert on_another_thread(begin)
    assert eventually(lambda: captured(pool) == [False])


def test_captures_of_cupys_runtime_functions_are_seen(pool: CupyPool, stream: Stream) -> None:
    with stream.on():
        runtime.streamBeginCapture(stream.ptr, RELAXED)
        one = array()
        where = span(one)
        del one
        assert runtime.streamEndCapture(stream.ptr) >= 0
        assert array().data.ptr not in where
