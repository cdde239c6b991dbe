"""Modelled time of the stand-in: kernels, copies, events and waits, in nanoseconds, in a process per test."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

from standin_calls import Cuda, on_standin

MIB = 1 << 20
TO_DEVICE, TO_HOST, INSIDE = 1, 2, 3
NOT_READY, SHORTEST = 600, 2000


class Clock:
    """A device that copies a byte in 1 ns to the host and in 2 ns from there, after 100 and 200 ns."""

    def __init__(self, cuda: Cuda, *, duplex: bool = True) -> None:
        numbers = [ctypes.c_double(number) for number in (100, 1, 200, 2, 4, 0.5)]
        cuda.library.mempool_standin_start_clock(*numbers[:4], int(duplex), *numbers[4:])
        cuda.library.mempool_standin_time.restype = ctypes.c_int64
        cuda.do("cudaSetDevice", 0)
        self.cuda = cuda
        module = cuda.get("cuModuleLoadData", b"an image of no known form")
        self.function = cuda.get("cuModuleGetFunction", module, b"kernel")
        self.device, self.host = cuda.get("cudaMalloc", MIB), cuda.get("cudaHostAlloc", MIB, 0)

    def stream(self, flags: int = 1) -> int:
        return int(self.cuda.get("cudaStreamCreateWithFlags", flags))

    def launch(self, stream: int) -> None:
        self.cuda.do("cuLaunchKernel", self.function, *[1] * 6, 0, stream, None, None)

    def kernel(self, stream: int, nanoseconds: int) -> None:
        """Run an operation of one kernel."""
        self.cuda.library.mempool_standin_begin_operation()
        self.launch(stream)
        self.cuda.library.mempool_standin_end_operation(ctypes.c_double(nanoseconds))

    def copy(self, stream: int, size: int, way: int) -> None:
        ends = {TO_HOST: (self.host, self.device), TO_DEVICE: (self.device, self.host)}
        to, source = ends.get(way, (self.device, self.device))
        self.cuda.do("cudaMemcpyAsync", to, source, size, way, stream)

    def event(self, stream: int) -> int:
        event = int(self.cuda.get("cudaEventCreate"))
        self.cuda.do("cudaEventRecord", event, stream)
        return event

    def wait(self, stream: int, event: int) -> None:
        self.cuda.do("cudaStreamWaitEvent", stream, event, 0)

    def between(self, begin: int, end: int) -> int:
        elapsed: Any = self.cuda.get("cudaEventElapsedTime", begin, end, kind=ctypes.c_float)
        return round(1e6 * elapsed)

    @property
    def time(self) -> int:
        """The time at which all work is done, for which the host waits."""
        self.cuda.do("cudaDeviceSynchronize")
        return int(self.cuda.library.mempool_standin_time())


@on_standin()
def test_kernels_and_copies_of_a_stream_follow_each_other(cuda: Cuda) -> None:
    clock = Clock(cuda)
    stream = clock.stream()
    events = [clock.event(stream)]
    for work in (
        lambda: clock.kernel(stream, 5000),
        lambda: clock.copy(stream, 1000, TO_HOST),
        lambda: clock.copy(stream, 1000, TO_DEVICE),
        lambda: clock.copy(stream, 1000, INSIDE),
        lambda: cuda.do("cudaMemsetAsync", clock.device, 0, 1000, stream),
        lambda: clock.kernel(stream, 10),
    ):
        work()
        events.append(clock.event(stream))
    times = [clock.between(*pair) for pair in pairwise(events)]
    assert times == [5000, 1100, 2200, 1000, 500, SHORTEST]
    assert clock.time == sum(times)


@on_standin()
def test_copies_of_both_directions_overlap_kernels_and_each_other(cuda: Cuda) -> None:
    clock = Clock(cuda)
    streams = [clock.stream() for _ in range(4)]
    clock.kernel(streams[0], 9000)
    clock.copy(streams[1], 4000, TO_HOST)
    clock.copy(streams[2], 4000, TO_DEVICE)
    clock.copy(streams[3], 1000, TO_HOST)  # after the other one of this direction
    begin = clock.event(clock.stream())
    assert [clock.between(begin, clock.event(stream)) for stream in streams] == [9000, 4100, 8200, 5200]
    assert clock.time == 9000


@on_standin()
def test_single_copy_engine_serves_both_directions_of_half_duplex_links(cuda: Cuda) -> None:
    clock = Clock(cuda, duplex=False)
    clock.copy(clock.stream(), 1000, TO_HOST)
    clock.copy(clock.stream(), 1000, TO_DEVICE)
    assert clock.time == 1100 + 2200


@on_standin()
def test_stream_waits_for_events_of_another_stream(cuda: Cuda) -> None:
    clock = Clock(cuda)
    compute, copies = clock.stream(), clock.stream()
    clock.kernel(compute, 5000)
    ready = clock.event(compute)
    clock.kernel(compute, 5000)
    clock.wait(copies, ready)
    clock.copy(copies, 1000, TO_HOST)
    copied = clock.event(copies)
    assert clock.between(ready, copied) == 1100
    clock.copy(copies, 9000, TO_HOST)
    clock.wait(compute, copied)  # which has passed
    clock.kernel(compute, 5000)
    assert clock.time == 15_200
    clock.wait(compute, clock.event(copies))
    clock.kernel(compute, 5000)
    assert clock.between(ready, clock.event(compute)) == 15_200


@on_standin()
def test_work_that_is_ready_earlier_runs_before_work_that_was_queued_earlier(cuda: Cuda) -> None:
    clock = Clock(cuda)
    compute, late, early = clock.stream(), clock.stream(), clock.stream()
    clock.kernel(compute, 9000)
    clock.wait(late, clock.event(compute))
    clock.kernel(late, 3000)
    clock.copy(late, 3000, TO_HOST)
    clock.copy(early, 2000, TO_HOST)
    begin = clock.event(clock.stream())
    assert clock.between(begin, clock.event(early)) == 2100
    clock.kernel(early, 4000)  # kernels fill the device: after the first
    assert clock.between(begin, clock.event(early)) == 13_000
    assert clock.between(begin, clock.event(late)) == 19_100


@on_standin()
def test_default_stream_and_blocking_streams_wait_for_each_other(cuda: Cuda) -> None:
    clock = Clock(cuda)
    blocking, other = clock.stream(0), clock.stream()
    clock.copy(other, 50_000, TO_DEVICE)
    clock.kernel(0, 5000)
    clock.copy(blocking, 1000, TO_HOST)
    clock.kernel(0, 5000)
    begin = clock.event(clock.stream())
    assert clock.between(begin, clock.event(0)) == 11_100
    assert clock.between(begin, clock.event(other)) == 100_200


@on_standin()
def test_kernels_of_an_operation_take_its_time_once_also_for_events_inside(cuda: Cuda) -> None:
    clock = Clock(cuda)
    compute, copies = clock.stream(), clock.stream()
    begin = clock.event(compute)
    cuda.library.mempool_standin_begin_operation()
    cuda.library.mempool_standin_begin_operation()
    assert not cuda.library.mempool_standin_has_launched()
    clock.launch(compute)
    inside = clock.event(compute)
    clock.wait(copies, inside)
    clock.copy(copies, 1000, TO_HOST)
    clock.launch(compute)
    assert cuda.code("cudaEventQuery", inside) == NOT_READY
    assert cuda.library.mempool_standin_has_launched()
    cuda.library.mempool_standin_end_operation(ctypes.c_double(7000))
    assert not cuda.library.mempool_standin_has_launched()  # the outer one, which has no kernel of its own
    cuda.library.mempool_standin_end_operation(ctypes.c_double(9000))
    ends = inside, clock.event(compute), clock.event(copies)
    assert [clock.between(begin, end) for end in ends] == [7000, 7000, 8100]


@on_standin()
def test_operation_takes_its_time_although_the_host_waits_within(cuda: Cuda) -> None:
    clock = Clock(cuda)
    stream = clock.stream()
    cuda.library.mempool_standin_begin_operation()
    clock.launch(stream)
    assert clock.time == SHORTEST
    clock.launch(stream)
    clock.launch(stream)
    cuda.library.mempool_standin_end_operation(ctypes.c_double(7000))
    assert clock.time == SHORTEST + 7000


@on_standin()
def test_events_have_passed_once_the_host_has_waited_for_later_work(cuda: Cuda) -> None:
    clock = Clock(cuda)
    stream, other = clock.stream(), clock.stream()
    clock.kernel(stream, 5000)
    first = clock.event(stream)
    clock.kernel(stream, 5000)
    last = clock.event(stream)
    assert [cuda.code("cudaEventQuery", event) for event in (first, last)] == [NOT_READY, NOT_READY]
    assert cuda.code("cudaStreamQuery", stream) == NOT_READY
    cuda.do("cudaEventSynchronize", first)
    assert [cuda.code("cudaEventQuery", event) for event in (first, last)] == [0, NOT_READY]
    clock.kernel(other, 3000)  # begins no earlier than the host's wait has ended, and the device is free
    assert clock.between(last, clock.event(other)) == 3000
    cuda.do("cudaDeviceSynchronize")
    assert [cuda.code("cudaEventQuery", last), cuda.code("cudaStreamQuery", other)] == [0, 0]
    clock.copy(other, 900, TO_HOST)
    assert clock.between(last, clock.event(other)) == 4000


@on_standin()
def test_loop_of_queries_ends(cuda: Cuda) -> None:
    clock = Clock(cuda)
    stream = clock.stream()
    clock.kernel(stream, 500_000)
    event = clock.event(stream)
    assert sum(cuda.code("cudaEventQuery", event) == NOT_READY for _ in range(1000)) == 500


@on_standin()
def test_host_memory_that_is_not_page_locked_is_copied_at_its_own_rate(cuda: Cuda) -> None:
    clock = Clock(cuda)
    stream, plain = clock.stream(), ctypes.create_string_buffer(4096)
    address = ctypes.addressof(plain)
    events = [clock.event(stream)]
    for call in (None, ("cudaHostRegister", address, 4096, 0), ("cudaHostUnregister", address)):
        if call is not None:
            cuda.do(*call)
        cuda.do("cudaMemcpyAsync", address, clock.device, 1000, TO_HOST, stream)
        events.append(clock.event(stream))
    assert [clock.between(*pair) for pair in pairwise(events)] == [4100, 1100, 4100]


@on_standin()
def test_graph_takes_the_time_of_its_kernels_at_each_launch(cuda: Cuda) -> None:
    clock = Clock(cuda)
    stream = clock.stream()
    cuda.do("cudaStreamBeginCapture", stream, 0)
    clock.kernel(stream, 5000)
    clock.copy(stream, 1000, TO_HOST)
    graph = cuda.get("cudaStreamEndCapture", stream, first=False)
    assert clock.time == 0
    for _ in range(2):
        cuda.do("cudaGraphLaunch", cuda.get("cudaGraphInstantiate", graph, 0), stream)
    assert clock.time == 12_200
