"""Engine for a GPU: copies to and from page-locked host memory, on two separate streams.

The host waits for the GPU only in copies of pageable memory, and before it unlocks memory. Otherwise streams
wait for events:

* an offload waits for all earlier work of the program's streams, and for reloads from the host memory that
the offload will overwrite;
* a reload waits for all earlier work of the stream that allocated the device memory, and for the offload of
  the same data;
* each of the program's streams waits for a transfer that the program needs.

A stream under capture may not wait for work outside the graph, so it does not count as one of the program's
streams until the end of the capture.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C import _DisableTorchDispatch

from mempool._core import CudaCopies, cuda_copy_functions
from mempool.cuda import DRIVER
from mempool.errors import UsageError
from mempool.torch.offload.engine import HostFullError, OffloadRefusedError
from mempool.torch.offload.link import SIZES, measure
from mempool.torch.offload.options import OPTIONS
from mempool.torch.offload.pinned_memory import PinnedArena, PinnedMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from solvers.swap import Link


@dataclass(eq=False)
class ArenaCopy:
    """Copy on the host.

    Attributes:
        size: bytes.
        at: offset in the arena.
        filled_by: the offload into the copy; None if the program's streams have waited for it.
        read_by: the last reload from the copy; earlier reloads end before.
        dropped: whether the copy is no longer needed.
    """

    size: int
    at: int
    filled_by: CudaTransfer | None = None
    read_by: CudaTransfer | None = None
    dropped: bool = False


class DeviceBytes(NamedTuple):
    """Memory on the device, kept alive by its owner.

    Attributes:
        owner: a storage, or a tensor.
        address: address of the first byte.
        size: bytes.
        device: the device.
    """

    owner: Any
    address: int
    size: int
    device: torch.device


@dataclass(eq=False)
class CudaTransfer:
    """A requested copy.

    Attributes:
        size: bytes.
        ended: event after the copy.
        data: the device's side, kept until the copy has ended or the program's streams wait for it.
        waits: events before and after each wait of the program's stream for the copy.
    """

    size: int
    ended: Any
    data: DeviceBytes | None
    waits: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Mark:
    """A moment of the program's stream, and the waits since the previous mark."""

    event: Any
    waits: list[tuple[Any, Any]]


class CudaEngine:
    """Copies between one GPU's memory and the host; the constructor does not touch CUDA."""

    streams = True
    sync_copier = None  # would make the program wait for the GPU

    def __init__(self, device: torch.device, host_bytes: int, *, runtime: Any = None) -> None:
        """Create an engine that allocates at most `host_bytes` of host memory on demand.

        Args:
            device: the GPU.
            host_bytes: most bytes of host memory for copies, page-locked if CUDA permits.
            runtime: replacement for `CudaRuntime` in tests.
        """
        self._device, self._host_bytes, self._runtime = device, host_bytes, runtime
        self._lock = threading.RLock()
        self._streams: dict[Any, None] = {}  # the program's streams, in the order of first use
        self._latest: Any = None  # the stream seen last, outside captures
        self._in_flight: tuple[deque[CudaTransfer], ...] = (deque(), deque())
        self._dropped: list[ArenaCopy] = []
        self._waits: deque[tuple[Any, Any]] = deque(maxlen=OPTIONS.cuda_waits)  # since the last mark
        self._uncounted: deque[tuple[Any, Any]] = deque(maxlen=OPTIONS.cuda_waits)  # for `take_waits`
        self._link: Link | None = None
        self._is_initialized = False
        self._captures = 0  # graphs being captured
        self._process = os.getpid()

    def _initialize(self) -> None:
        """Create streams and arena, and wait once for all earlier work, also on unknown streams."""
        if self._is_initialized:
            return
        if self._device.index is None and self._device.type == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._runtime = self._runtime or CudaRuntime(self._device)
        self._out, self._in = self._runtime.stream(), self._runtime.stream()
        self._arena = PinnedArena(self._runtime.locked(self._host_bytes), self._host_bytes)
        self._runtime.synchronize()
        self._is_initialized = True

    def _is_usable(self) -> bool:
        """Return whether this process uses CUDA, unlike a forked child of such a process."""
        if self._process != os.getpid():
            return False
        return self._is_initialized or self._runtime is not None or bool(torch.cuda.is_initialized())

    def _current_stream(self) -> Any:
        """Return the program's stream; a new stream first waits for all work so far."""
        self._initialize()
        stream = self._runtime.current()
        if stream is self._latest:
            return stream
        if self._captures:
            self._leave_captured_streams()
        if stream not in self._streams and not self._runtime.capturing():
            for other in (self._out, self._in, *self._streams):
                self._runtime.order(stream, self._runtime.event(other))
            self._streams[stream] = None
        self._latest = stream if stream in self._streams and not self._captures else None
        return stream

    def _leave_captured_streams(self) -> None:
        """Forget the streams under capture; their earlier work was ordered at the begin of the capture."""
        for stream in list(self._streams):
            if self._runtime.capturing(stream):
                del self._streams[stream]

    def current_stream(self) -> Any:
        """See `Engine`."""
        if self._process != os.getpid():
            return None
        if self._runtime is not None:
            return self._runtime.current()
        return torch.cuda.current_stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """See `Engine`."""
        captured = self._captures > 0 and self._runtime.capturing(stream)
        return contextlib.nullcontext() if captured else self._runtime.using(stream)

    # --- captures

    def begin_capture(self) -> None:
        """See `Engine`; order all work so far, since streams under capture permit no events."""
        with self._lock:
            if self._is_usable():
                self._current_stream()
                self.fence()
                for stream, copies in itertools.product(self._streams, (self._out, self._in)):
                    self._runtime.order(copies, self._runtime.event(stream))
                self._streams.pop(self._runtime.current(), None)
            self._captures += 1
            self._latest = None

    def end_capture(self) -> None:
        """See `Engine`."""
        with self._lock:
            self._captures -= 1

    def is_capturing(self) -> bool:
        """See `Engine`."""
        return self._captures > 0 and self._runtime.capturing()

    def check_reload(self) -> None:
        """See `Engine`.

        Raises:
            UsageError: a graph is under capture, and would run the copy at each replay instead of now; or
                this is a forked child.
        """
        if not self._is_usable():
            raise UsageError("what lies on the GPU is on the host now, and CUDA serves no forked child")
        self._initialize()
        if self._runtime.capturing():
            raise UsageError(
                "a tensor that the CUDA graph uses is on the host: capture the graph before the limit is "
                "set, or train without a limit"
            )

    # --- copies

    def bytes_of(self, storage: Any) -> DeviceBytes:
        """See `Engine`."""
        address = torch._C.StorageBase.data_ptr(storage)
        return DeviceBytes(storage, address, torch._C.StorageBase.nbytes(storage), storage.device)

    def address(self, copy: Any) -> int:
        """See `Engine`; kernels may read the memory at this address."""
        return self._arena.address + int(copy.at)

    def offload(self, data: torch.Tensor | DeviceBytes, at: int = -1) -> tuple[ArenaCopy, CudaTransfer]:
        """See `Engine`; nothing is offloaded during a graph capture and in a forked child.

        Raises:
            OffloadRefusedError: the arena is full, or offloads are impossible now.
        """
        with self._lock:
            if not self._is_usable():
                raise OffloadRefusedError("CUDA serves no forked child")
            self._current_stream()
            if self._runtime.capturing():
                raise OffloadRefusedError("nothing leaves the GPU while a graph is captured")
            data = _device_bytes(data)
            if data.device != self._device:
                raise OffloadRefusedError(f"what lies on {data.device} does not leave {self._device}")
            self._release_finished()
            copied = ArenaCopy(data.size, self._allocate(data.size, at))
            ended = self._runtime.copy(
                self._out, self.address(copied), data.address, data.size, self._streams
            )
            copied.filled_by = self._track(self._out, data, ended)
            return copied, copied.filled_by

    def reload(self, copy: Any, data: torch.Tensor | DeviceBytes) -> CudaTransfer:
        """See `Engine`.

        Raises:
            UsageError: see `check_reload`.
        """
        with self._lock:
            self.check_reload()
            stream = self._current_stream()
            self._release_finished()
            data = _device_bytes(data)
            filled = () if copy.filled_by is None else (copy.filled_by.ended,)
            ended = self._runtime.copy(
                self._in, data.address, self.address(copy), data.size, (stream,), filled
            )
            copy.read_by = flight = self._track(self._in, data, ended)
            return flight

    def _track(self, stream: Any, data: DeviceBytes, ended: Any) -> CudaTransfer:
        flight = CudaTransfer(data.size, ended, data)
        self._in_flight[stream is self._in].append(flight)
        return flight

    def wait(self, transfer: Any) -> float:
        """See `Engine`; the program's streams wait, not the program."""
        with self._lock:
            if transfer.data is not None and self._is_usable() and not transfer.ended.query():
                stream = self._current_stream()
                before = self._runtime.event(stream, timing=True)
                for other in self._streams:
                    self._runtime.order(other, transfer.ended)
                times = before, self._runtime.event(stream, timing=True)
                transfer.waits.append(times)
                self._waits.append(times)
                self._uncounted.append(times)
            transfer.data = None
        return 0.0

    def fence(self) -> None:
        """See `Engine`; each of several streams waits for all other streams."""
        with self._lock:
            if not self._is_usable():
                return
            self._current_stream()
            if len(self._streams) > 1:
                events = [self._runtime.event(stream) for stream in self._streams]
                for stream, event in itertools.product(self._streams, events):
                    self._runtime.order(stream, event)

    def native_copies(self, size: int) -> CudaNativeCopies | None:
        """See `Engine`."""
        with self._lock:
            if not self._is_usable() or self._captures:
                return None
            stream = self._current_stream()
            if [*self._streams] != [stream] or not isinstance(self._runtime, CudaRuntime):
                return None
            self._free_dropped(wait=True)
            if (at := self._arena.allocate(size)) is None:
                self._synchronize_copies()
                if self._arena.join(size) or self._arena.grow(size):
                    at = self._arena.allocate(size)
            if at is None:
                return None
            streams = stream.cuda_stream, self._out.cuda_stream, self._in.cuda_stream
            handles = *self._runtime.native_handles(), *streams, self._arena.address, at
            return CudaNativeCopies(handles, size, self._arena, self._lock)

    def _release_finished(self) -> None:
        """Release the data of ended copies without waits."""
        for flying in self._in_flight:
            while flying and (flying[0].data is None or flying[0].ended.query()):
                flying.popleft().data = None

    # --- the host's memory

    def drop(self, copy: Any) -> None:
        """See `Engine`."""
        with self._lock:
            if not copy.dropped:
                copy.dropped = True
                self._dropped.append(copy)

    def _allocate(self, size: int, planned: int) -> int:
        """Return an offset for an offload, which is ordered after earlier transfers at this offset."""
        self._free_dropped(wait=False)
        if planned >= 0:
            if self._arena.allocate_at(planned, size):
                return planned
            self._free_dropped(wait=True)  # the schedule drops the former copy before
            if self._arena.allocate_at(planned, size):
                return planned
        take = self._arena.allocate if planned < 0 else self._arena.allocate_last
        at = take(size)
        if at is None and self._dropped:
            self._free_dropped(wait=True)
            at = take(size)
        if at is None and self._arena.grow(size):
            at = take(size)
        if at is None:
            raise HostFullError(size, self._host_bytes)
        return at

    def _free_dropped(self, *, wait: bool) -> None:
        """Free unused dropped copies.

        `wait`: free copies in use, and order later offloads after their transfers.
        """
        kept = []
        for copy in self._dropped:
            transfers = (copy.filled_by, copy.read_by)
            running = [
                transfer for transfer in transfers if transfer is not None and not transfer.ended.query()
            ]
            if running and not wait:
                kept.append(copy)
                continue
            for transfer in running:
                self._runtime.order(self._out, transfer.ended)
            self._arena.release(copy.at, copy.size)
        self._dropped = kept

    def reserve(self, size: int) -> None:
        """See `Engine`."""
        with self._lock:
            self._initialize()
            self._arena.reserve(size)

    def end_iteration(self) -> None:
        """See `Engine`; locking is slow, so memory is released only after many iterations without use."""
        self._waits.clear()
        with self._lock:
            if not (self._is_initialized and self._is_usable()) or self._runtime.capturing():
                return
            self._free_dropped(wait=False)
            if self._arena.end_iteration():
                self._synchronize_copies()
                self._arena.release_idle()

    def _synchronize_copies(self) -> None:
        """Wait until all copies have ended."""
        for stream in (self._out, self._in):
            stream.synchronize()

    @property
    def host_bytes(self) -> int:
        """See `Engine`; the unused memory of the arena counts, too."""
        return self._arena.size if self._is_initialized else 0

    # --- times

    def note_stream(self) -> None:
        """See `Engine`."""
        if self._is_usable():
            with self._lock:
                self._current_stream()

    def mark(self, prepare: Callable[[Any], object] | None = None) -> Mark:
        """See `Engine`."""
        with self._lock:
            if not self._is_usable():
                return Mark(None, [])
            stream = self._current_stream()
            if self._runtime.capturing():
                return Mark(None, [])
            self._release_finished()
            if prepare is not None:
                before = self._runtime.event(stream, timing=True)
                prepare(stream)
                self._waits.append((before, self._runtime.event(stream, timing=True)))
            waits = list(self._waits)
            self._waits.clear()
            return Mark(self._runtime.event(stream, timing=True), waits)

    def seconds(self, marks: list[Mark]) -> list[float]:
        """See `Engine`; 0 for operations under capture, and before CUDA was in use."""
        return [
            max(_seconds_between([(before.event, after.event)]) - _seconds_between(after.waits), 0.0)
            if before.event is not None and after.event is not None
            else 0.0
            for before, after in itertools.pairwise(marks)
        ]

    def waited(self, transfer: Any) -> float:
        """See `Engine`; waits that the device has not reached yet count 0."""
        return _seconds_between([pair for pair in transfer.waits if pair[1].query()])

    def take_waits(self) -> list[float]:
        """See `Engine`."""
        ended = []
        with self._lock:
            while self._is_usable() and self._uncounted and self._uncounted[0][1].query():
                ended.append(_seconds_between([self._uncounted.popleft()]))
        return ended

    def link(self) -> Link:
        """See `Engine`."""
        if self._link is None:
            self._initialize()
            with _DisableTorchDispatch(), torch.no_grad():  # not the program's tensors
                timed = _TimedCopies(self._runtime, self._out, self._in, self._arena)
                try:
                    self._link = measure(timed)
                finally:
                    timed.close()
        return self._link

    def close(self) -> None:
        """See `Engine`."""
        with self._lock:
            if self._is_initialized and self._is_usable():
                self._synchronize_copies()
                self._release_finished()
                self._arena.close()
                self._is_initialized = False


class CudaNativeCopies:
    """See `NativeCopies`."""

    def __init__(
        self, handles: tuple[int, int, int, int, int, int, int], size: int, arena: PinnedArena, lock: Any
    ) -> None:
        """Own a range of `size` bytes of the arena."""
        # one statement, so that Ctrl-C leaves all or nothing for `__del__`
        self.handles, self._arena, self._lock, self._range = handles, arena, lock, [(handles[-1], size)]

    def __del__(self) -> None:
        """Return the range, unless `release` has: Ctrl-C may come before the first use."""
        self.release([], [])

    def release(self, held: list[Any], places: list[tuple[int, int]]) -> None:
        """See `NativeCopies`; Ctrl-C may leave places taken until the copies of `copy_at` are dropped."""
        with self._lock:
            while self._range:
                self._arena.release(*self._range.pop())
            for copy in held:
                if not copy.dropped:
                    copy.dropped = True
                    self._arena.release(copy.at, copy.size)
            for at, size in places:
                self._arena.allocate_at(at, size)

    def copy_at(self, at: int, size: int) -> ArenaCopy:
        """See `NativeCopies`."""
        return ArenaCopy(size, at)


class CudaRuntime:
    """Streams, events, copies and page-locked memory of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Any, Any] = {}  # streams by PyTorch's name of them

    @functools.cached_property
    def _copies(self) -> CudaCopies:
        with torch.cuda.device(self._device):
            torch.cuda.mem_get_info()  # makes the device's context current in this thread
            return CudaCopies(DRIVER)

    def native_handles(self) -> tuple[int, int]:
        """Return the addresses of the C functions for copies, and of their object."""
        return cuda_copy_functions(), self._copies.address

    def stream(self) -> Any:
        """Create a stream."""
        return torch.cuda.Stream(self._device)

    def current(self) -> Any:
        """Return this thread's current stream."""
        if self._device.index is None:
            return torch.cuda.current_stream(self._device)
        named = torch._C._cuda_getCurrentStream(self._device.index)  # much faster than a new object
        if (stream := self._known.get(named)) is None:
            stream = self._known[named] = torch.cuda.current_stream(self._device)
        return stream

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context that makes a stream this thread's current stream."""
        if stream == self.current() and stream.device_index == torch.cuda.current_device():
            return contextlib.nullcontext()
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def synchronize(self) -> None:
        """Wait until all streams have finished their work."""
        torch.cuda.synchronize(self._device)

    def capturing(self, stream: Any = None) -> bool:
        """Return whether a stream, by default the current one, is under capture."""
        if stream is None:
            return bool(torch._C._cuda_isCurrentStreamCapturing())
        with torch.cuda.stream(stream):
            return self.capturing()

    def event(self, stream: Any, *, timing: bool = False) -> Any:
        """Return an event after the stream's work so far, with a time if `timing`."""
        if not timing:
            return self._copies.record(stream.cuda_stream)
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def order(self, stream: Any, event: Any) -> None:
        """Make later work of a stream wait for an event without timing."""
        event.order_before(stream.cuda_stream)

    def copy(
        self,
        stream: Any,
        target: int,
        source: int,
        size: int,
        after: Iterable[Any] = (),
        events: Iterable[Any] = (),
    ) -> Any:
        """Enqueue a copy of `size` bytes between two addresses; the host's side is page-locked.

        The copy waits for `events` and for the present work of the streams `after`. Returns an event after
        the copy.
        """
        return self._copies.copy(
            stream.cuda_stream, target, source, size, [one.cuda_stream for one in after], list(events)
        )

    def data(self, size: int) -> torch.Tensor:
        """Allocate device memory, uint8[size]."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def locked(self, size: int) -> PinnedMemory:
        """Reserve host addresses for `size` bytes, not yet page-locked."""
        return PinnedMemory(size, self._device)


def _device_bytes(data: torch.Tensor | DeviceBytes) -> DeviceBytes:
    if isinstance(data, DeviceBytes):
        return data
    return DeviceBytes(
        data, torch._C.TensorBase.data_ptr(data), data.numel() * data.element_size(), data.device
    )


def _seconds_between(pairs: list[tuple[Any, Any]]) -> float:
    """Return the sum of the seconds from the first to the second event of all pairs.

    The events of a pair may be of two streams, so the second may precede the first.
    """
    for event in itertools.chain.from_iterable(pairs):
        event.synchronize()
    return float(sum(before.elapsed_time(after) for before, after in pairs)) / 1e3


class _TimedCopies:
    """Implementation of `TimedCopies` on the engine's streams, with separate memory for each direction."""

    def __init__(self, runtime: Any, out: Any, back: Any, arena: PinnedArena) -> None:
        self._runtime, self._streams = runtime, (out, back)
        size = 2 * max(SIZES)
        self._device, self._memory = runtime.data(size), runtime.locked(size)
        if not self._memory.lock(0, size):
            arena.note_refusal(size)  # further copies will lie in pageable memory too
        self._host = self._memory.data(0, size)

    def timed(self, size: int, *, out: bool, back: bool) -> float:
        """See `TimedCopies`."""
        half = max(SIZES)
        here, there = self._device, self._host
        asked = [(self._streams[0], there[:size], here[:size])] * out
        asked += [(self._streams[1], here[half : half + size], there[half : half + size])] * back
        begins = [self._runtime.event(stream, timing=True) for stream, _, _ in asked]
        address = torch._C.TensorBase.data_ptr
        for stream, target, source in asked:
            self._runtime.copy(stream, address(target), address(source), size)
        ends = [self._runtime.event(stream, timing=True) for stream, _, _ in asked]
        return max(_seconds_between([pair]) for pair in itertools.product(begins, ends))

    def close(self) -> None:
        """Unlock the host's side."""
        for stream in self._streams:
            stream.synchronize()
        self._memory.close()
