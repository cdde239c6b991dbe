"""A GPU's streams without a GPU: queues whose tasks run in whatever order events permit.

`FakeRuntime` is for tests what `mempool.torch.offload.cuda_engine.CudaRuntime` is for a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch._C import _DisableTorchDispatch


class Event:
    """An event that a stream reaches."""

    def __init__(self, device: FakeRuntime) -> None:
        self._device = device
        self.reached: float | None = None

    def query(self) -> bool:
        return self.reached is not None

    def synchronize(self) -> None:
        self._device.run_until(self.query)

    def elapsed_time(self, later: Event) -> float:
        """Return the milliseconds between two events."""
        assert self.reached is not None
        assert later.reached is not None
        return later.reached - self.reached


class Stream:
    """A queue of tasks, some of which wait for events."""

    def __init__(self, device: FakeRuntime) -> None:
        self._device = device
        self.tasks: deque[Callable[[], None] | Event] = deque()

    def do(self, task: Callable[[], None] | Event) -> None:
        self.tasks.append(task)
        self._device.asked(self)

    def wait_event(self, event: Event) -> None:
        self.do(event)

    def synchronize(self) -> None:
        self._device.run_until(lambda: not self.tasks)

    @property
    def runs(self) -> bool:
        """Return true if the next task can run now."""
        task = self.tasks[0] if self.tasks else None
        return task is not None and (not isinstance(task, Event) or task.query())


class FakeRuntime:
    """A device that runs the tasks of its streams one at a time, in a random order with preferred streams.

    Args:
        seed: seed of the order.
        eager: run tasks of the first stream at once, so that the CPU's operations can stand for them.
        lockable: limit on the page-locked bytes of the host.
    """

    def __init__(self, seed: int = 0, *, eager: bool = False, lockable: int = 1 << 40) -> None:
        self._random, self._eager, self._lockable = random.Random(seed), eager, lockable
        self._streams: list[Stream] = []
        self._weights: list[float] = []
        self.now, self.graph, self.locks, self.copying = 0.0, False, 0, 0
        self.main = self._current = self.stream()

    # --- what the engine sees

    def stream(self) -> Stream:
        made = Stream(self)
        self._streams.append(made)
        self._weights.append(self._random.choice((0.01, 1.0, 100.0)))
        return made

    def current(self) -> Stream:
        return self._current

    def synchronize(self) -> None:
        self.finish()

    def capturing(self, stream: Stream | None = None) -> bool:
        return self.graph

    def event(self, stream: Stream, *, timing: bool = False) -> Event:
        event = Event(self)

        def reach() -> None:
            event.reached = self.now

        stream.do(reach)
        return event

    def order(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def copy(
        self,
        stream: Stream,
        target: int,
        source: int,
        size: int,
        after: Iterable[Stream] = (),
        events: Iterable[Event] = (),
    ) -> Event:
        def task() -> None:
            ctypes.memmove(target, source, size)
            self.copying -= 1

        for one in [self.event(other) for other in after] + list(events):
            stream.wait_event(one)
        self.copying += 1
        stream.do(task)
        return self.event(stream)

    def data(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def locked(self, size: int) -> FakeRuntime.PinnedMemory:
        return self.PinnedMemory(self, size)

    class PinnedMemory:
        def __init__(self, device: FakeRuntime, size: int) -> None:
            self._device, self._parts = device, list[tuple[int, int]]()
            with _DisableTorchDispatch():
                self._bytes = torch.zeros(size, dtype=torch.uint8)
                self.address = torch._C.TensorBase.data_ptr(self._bytes)

        def lock(self, at: int, size: int) -> bool:
            if size > self._device._lockable:
                return False
            self._device.locks += 1
            self._device._lockable -= size
            self._parts.append((at, at + size))
            return True

        def data(self, at: int, size: int) -> torch.Tensor:
            return self._bytes[at : at + size]

        def release(self, at: int, size: int) -> None:
            assert self._device.copying == 0, "unlocked under a copy"
            self._device._lockable += size * ((at, at + size) in self._parts)
            self._parts = [part for part in self._parts if part != (at, at + size)]

        def close(self) -> None:
            for begin, end in self._parts:
                self.release(begin, end - begin)

    # --- what tests do

    @contextlib.contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def asked(self, stream: Stream) -> None:
        """Note a new task of a stream."""
        if self._eager and stream is self.main:
            self.run_until(lambda: not stream.tasks)

    def advance(self, most: int) -> None:
        """Run a random number of tasks."""
        for _ in range(self._random.randint(0, most)):
            if not self._step():
                return

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            assert self._step(), "streams wait for what nobody will reach"

    def finish(self) -> None:
        self.run_until(lambda: not any(stream.tasks for stream in self._streams))

    def _step(self) -> bool:
        rows = [row for row, stream in enumerate(self._streams) if stream.runs]
        if not rows:
            return False
        if self._eager and self.main.runs:
            rows = [0]
        (row,) = self._random.choices(rows, [self._weights[row] for row in rows])
        task = self._streams[row].tasks.popleft()
        self.now += 1.0
        if not isinstance(task, Event):
            task()
        return True
