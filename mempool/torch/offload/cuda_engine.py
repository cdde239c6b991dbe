"""Engine for a GPU: copies to and from page-locked host memory, on two streams beside the program's.

The host never waits for the GPU. Work that must follow other work waits for an event in its stream:

* an offload waits for all earlier work of the program's streams, and for reloads out of the host memory that
  the offload will overwrite;
* a reload waits for all earlier work of the stream that allocated the device memory, and for the offload of
  the same data;
* each of the program's streams waits for a transfer that the program needs.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _DisableTorchDispatch

from mempool.errors import UsageError
from mempool.torch.offload.cuda_runtime import CudaRuntime
from mempool.torch.offload.engine import HostFullError
from mempool.torch.offload.link import SIZES, measure
from mempool.torch.offload.pinned_arena import LockedArena

if TYPE_CHECKING:
    from solvers.swap import Link

#: Waits whose times are kept for the next mark. A rewritten graph sets no marks.
_MOST_WAITS = 4096


@dataclass(eq=False)
class Copied:
    """Copy on the host.

    Attributes:
        size: bytes.
        at: offset in the arena.
        data: the bytes.
        filled: the offload into the copy.
        read: the last reload from the copy; earlier reloads end before.
        dropped: whether the copy is no longer wanted.
    """

    size: int
    at: int
    data: torch.Tensor
    filled: Flight | None = None
    read: Flight | None = None
    dropped: bool = False


@dataclass(eq=False)
class Flight:
    """A requested copy.

    Attributes:
        size: bytes.
        ended: event after the copy.
        data: the device's side, kept until the copy has ended, or the program's streams wait for the copy.
        waits: events before and after each wait of the program's stream for the copy.
    """

    size: int
    ended: Any
    data: torch.Tensor | None
    waits: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Mark:
    """A moment of the program's stream, and the waits since the previous mark."""

    event: Any
    waits: list[tuple[Any, Any]]


class CudaEngine:
    """Copies between one GPU's memory and the host; the constructor does not touch CUDA."""

    streams = True
    own = None  # the program would have to wait for the GPU

    def __init__(self, device: torch.device, host_bytes: int, *, runtime: Any = None) -> None:
        """Create an engine that locks at most `host_bytes` of the host, as needed.

        Args:
            device: the GPU.
            host_bytes: most bytes that are locked.
            runtime: replacement for `CudaRuntime`, in tests.
        """
        self._device, self._host_bytes, self._runtime = device, host_bytes, runtime
        self._lock = threading.RLock()
        self._streams: dict[Any, None] = {}  # the program's streams, in the order of first use
        self._flying: tuple[deque[Flight], ...] = (deque(), deque())
        self._dropped: list[Copied] = []
        self._waits: deque[tuple[Any, Any]] = deque(maxlen=_MOST_WAITS)
        self._link: Link | None = None
        self._begun = False
        self._process = os.getpid()

    def _begin(self) -> None:
        """Create streams and arena, and wait once for all earlier work, also on streams not yet known."""
        if self._begun:
            return
        if self._device.index is None and self._device.type == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._runtime = self._runtime or CudaRuntime(self._device)
        self._out, self._in = self._runtime.stream(), self._runtime.stream()
        self._arena = LockedArena(self._runtime.locked(self._host_bytes), self._host_bytes)
        self._runtime.synchronize()
        self._begun = True

    def _works(self) -> bool:
        """Return whether this process uses CUDA; a forked child of a process with CUDA does not."""
        if self._process != os.getpid():
            return False
        return self._begun or self._runtime is not None or bool(torch.cuda.is_initialized())

    def _now(self) -> Any:
        """Return the program's stream; a new stream first waits for all copies so far."""
        self._begin()
        stream = self._runtime.current()
        if stream not in self._streams:
            for other in (self._out, self._in):
                stream.wait_event(self._runtime.event(other))
            self._streams[stream] = None
        return stream

    # --- copies

    def out(self, data: torch.Tensor, at: int = -1) -> tuple[Copied, Flight]:
        """See `Engine`; nothing is offloaded during a graph capture and in a forked child.

        Raises:
            HostFullError: the arena has no room for the copy, or offloads are impossible now.
        """
        with self._lock:
            if not self._works():
                raise HostFullError("CUDA serves no forked child")
            self._now()
            if self._runtime.capturing():
                raise HostFullError("nothing leaves the GPU while a graph is captured")
            if data.device != self._device:
                raise HostFullError(f"what lies on {data.device} does not leave {self._device}")
            self._reap()
            at = self._take(data.numel(), at)
            copied = Copied(data.numel(), at, self._arena.data(at, data.numel()))
            for stream in self._streams:
                self._out.wait_event(self._runtime.event(stream))
            self._runtime.copy(self._out, copied.data, data)
            copied.filled = self._fly(self._out, data)
            return copied, copied.filled

    def back(self, copy: Any, data: torch.Tensor) -> Flight:
        """See `Engine`.

        Raises:
            UsageError: a graph is being captured, which would run the copy at each replay, and not now; or
                this is a forked child.
        """
        with self._lock:
            if not self._works():
                raise UsageError("what lies on the GPU is on the host now, and CUDA serves no forked child")
            stream = self._now()
            if self._runtime.capturing():
                raise UsageError(
                    "what a CUDA graph uses is on the host: capture it before, or without a limit"
                )
            self._reap()
            self._in.wait_event(self._runtime.event(stream))
            self._in.wait_event(copy.filled.ended)
            self._runtime.copy(self._in, data, copy.data)
            copy.read = flight = self._fly(self._in, data)
            return flight

    def _fly(self, stream: Any, data: torch.Tensor) -> Flight:
        flight = Flight(len(data), self._runtime.event(stream), data)
        self._flying[stream is self._in].append(flight)
        return flight

    def wait(self, transfer: Any) -> float:
        """See `Engine`; the program's streams wait, not the program."""
        with self._lock:
            if transfer.data is not None and self._works() and not transfer.ended.query():
                stream = self._now()
                before = self._runtime.event(stream, timing=True)
                for one in self._streams:
                    one.wait_event(transfer.ended)
                times = before, self._runtime.event(stream, timing=True)
                transfer.waits.append(times)
                self._waits.append(times)
            transfer.data = None
        return 0.0

    def fence(self) -> None:
        """See `Engine`; each of several streams waits for all others."""
        with self._lock:
            if not self._works():
                return
            self._now()
            if len(self._streams) > 1:
                events = [self._runtime.event(stream) for stream in self._streams]
                for stream, event in itertools.product(self._streams, events):
                    stream.wait_event(event)

    def _reap(self) -> None:
        """Release the data of ended copies that nobody waited for."""
        for flying in self._flying:
            while flying and (flying[0].data is None or flying[0].ended.query()):
                flying.popleft().data = None

    # --- the host's memory

    def drop(self, copy: Any) -> None:
        """See `Engine`."""
        with self._lock:
            if not copy.dropped:
                copy.dropped = True
                self._dropped.append(copy)

    def _take(self, size: int, planned: int) -> int:
        """Return a place for an offload, ordered after the transfers that still use that place."""
        self._give(wait=False)
        if planned >= 0:
            if self._arena.take_at(planned, size):
                return planned
            self._give(wait=True)  # the copy planned to be gone by now
            if self._arena.take_at(planned, size):
                return planned
        take = self._arena.take if planned < 0 else self._arena.take_last
        at = take(size)
        if at is None and self._dropped:
            self._give(wait=True)
            at = take(size)
        if at is None and self._arena.grow(size):
            at = take(size)
        if at is None:
            raise HostFullError(f"no {size:,} bytes are left on the host")
        return at

    def _give(self, *, wait: bool) -> None:
        """Free dropped copies that are not in use; with `wait`, order later offloads after the transfers."""
        kept = []
        for copy in self._dropped:
            flying = [one for one in (copy.filled, copy.read) if one is not None and not one.ended.query()]
            if flying and not wait:
                kept.append(copy)
                continue
            for flight in flying:
                self._out.wait_event(flight.ended)
            self._arena.give(copy.at, copy.size)
        self._dropped = kept

    def reserve(self, size: int) -> None:
        """See `Engine`; locks the missing bytes in one part."""
        with self._lock:
            self._begin()
            if (missing := min(size, self._host_bytes) - self._arena.locked) > 0:
                self._arena.grow(missing)

    def rest(self) -> None:
        """See `Engine`; locked memory is kept, since locking is slow."""
        self._waits.clear()

    @property
    def host_bytes(self) -> int:
        """See `Engine`; all locked memory counts, used or not."""
        return self._arena.locked if self._begun else 0

    # --- times

    def look(self) -> None:
        """See `Engine`."""
        if self._works():
            with self._lock:
                self._now()

    def mark(self) -> Mark:
        """See `Engine`."""
        with self._lock:
            if not self._works():
                return Mark(None, [])
            stream = self._now()
            if self._runtime.capturing():
                return Mark(None, [])
            self._reap()
            waits = list(self._waits)
            self._waits.clear()
            return Mark(self._runtime.event(stream, timing=True), waits)

    def seconds(self, marks: list[Mark]) -> list[float]:
        """See `Engine`; 0 for an operation captured into a graph, or run before CUDA was in use."""
        return [
            max(_between([(before.event, after.event)]) - _between(after.waits), 0.0)
            if before.event is not None and after.event is not None
            else 0.0
            for before, after in itertools.pairwise(marks)
        ]

    def waited(self, transfer: Any) -> float:
        """See `Engine`; waits that the device has not reached yet count 0, as nobody waits for them."""
        return _between([pair for pair in transfer.waits if pair[1].query()])

    def link(self) -> Link:
        """See `Engine`."""
        if self._link is None:
            self._begin()
            with _DisableTorchDispatch(), torch.no_grad():  # not the program's tensors
                timed = _Timed(self._runtime, self._out, self._in)
                try:
                    self._link = measure(timed)
                finally:
                    timed.close()
        return self._link

    def close(self) -> None:
        """See `Engine`."""
        with self._lock:
            if self._begun and self._works():
                for stream in (self._out, self._in):
                    stream.synchronize()
                self._reap()
                self._arena.close()
                self._begun = False


def _between(pairs: list[tuple[Any, Any]]) -> float:
    """Return the sum of the seconds from the first to the second event of all pairs."""
    for _, after in pairs:
        after.synchronize()
    return float(sum(before.elapsed_time(after) for before, after in pairs)) / 1e3


class _Timed:
    """Implementation of `Copies` on the engine's streams, with separate memory for each direction."""

    def __init__(self, runtime: Any, out: Any, back: Any) -> None:
        self._runtime, self._streams = runtime, (out, back)
        size = 2 * max(SIZES)
        self._device, self._memory = runtime.data(size), runtime.locked(size)
        if not self._memory.lock(0, size):
            raise UsageError(f"CUDA locks no {size:,} bytes of the host: see `ulimit -l` and the free memory")
        self._host = self._memory.data(0, size)

    def timed(self, size: int, *, out: bool, back: bool) -> float:
        """See `Copies`."""
        half = max(SIZES)
        here, there = self._device, self._host
        asked = [(self._streams[0], there[:size], here[:size])] * out
        asked += [(self._streams[1], here[half : half + size], there[half : half + size])] * back
        begins = [self._runtime.event(stream, timing=True) for stream, _, _ in asked]
        for stream, target, source in asked:
            self._runtime.copy(stream, target, source)
        ends = [self._runtime.event(stream, timing=True) for stream, _, _ in asked]
        return max(_between([pair]) for pair in itertools.product(begins, ends))

    def close(self) -> None:
        """Unlock the host's side."""
        for stream in self._streams:
            stream.synchronize()
        self._memory.close()
