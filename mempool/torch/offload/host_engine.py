"""Engine for CPU tensors: two threads copy to private memory, like a GPU's copy engines."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mempool._core import FreeList, Signal, TakenRange
from mempool.torch.offload.engine import HostFullError
from mempool.torch.offload.host_memory import PrivateMemory
from mempool.torch.offload.link import measure
from mempool.torch.offload.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from solvers.swap import Link

_OUT, _BACK = range(2)
_TIMED_BYTES = OPTIONS.link_cpu_bytes


@dataclass(eq=False)
class ArenaCopy:
    """Copy on the host.

    Attributes:
        size: bytes.
        at: offset in the arena.
        memory: the memory, which transfers under way also keep; None once dropped.
        filled_by: the transfer that fills the copy; None for a synchronous copy.
    """

    size: int
    at: int
    memory: TakenRange | None = None
    filled_by: HostTransfer | None = None


@dataclass(eq=False)
class HostTransfer:
    """A requested copy.

    Attributes:
        size: bytes.
        copied: the host's side.
        memory: the memory of the host's side, kept until the copy has ended.
        target: address to write.
        source: address to read.
        data: the device's side, kept until the copy has ended.
        predecessor: a copy that must end first.
        waited: seconds that the program waited for the copy.
        ended: event set at the end of the copy.
    """

    size: int
    copied: ArenaCopy
    target: int
    source: int
    data: Any
    predecessor: HostTransfer | None = None
    waited: float = 0.0
    ended: Signal = field(default_factory=Signal)
    memory: TakenRange | None = None

    def __post_init__(self) -> None:
        """Keep the host's memory."""
        self.memory = self.copied.memory

    def run(self) -> None:
        """Copy the bytes without the interpreter's lock."""
        ctypes.memmove(self.target, self.source, self.size)
        self.memory = None
        self.ended.set()

    @property
    def done(self) -> bool:
        """Return whether the copy has ended."""
        return self.ended.is_set()


class StorageBytes:
    """All bytes of a storage on the CPU, with the tensor methods that the engine uses."""

    __slots__ = ("storage",)

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    def numel(self) -> int:
        """Return the number of bytes."""
        return int(self.storage.nbytes())


class HostEngine:
    """Copies between the CPU's tensors and an arena that is private to the process.

    With one thread per direction, both directions and the program run concurrently. A forked child lacks
    these threads: it makes copies synchronously in its own copy of all memory, including the copies that were
    under way at the fork.
    """

    streams = False

    def __init__(self, host_bytes: int) -> None:
        """Create an engine with an untouched arena of `host_bytes`.

        Raises:
            UsageError: the system has no address range of that size.
        """
        one_core = len(os.sched_getaffinity(0)) == 1  # threads would only alternate
        self.sync_bytes = sys.maxsize if one_core else OPTIONS.sync_copy_bytes
        self._memory = PrivateMemory(host_bytes)
        self._free_list = FreeList(self._memory.size)
        self._in_flight: tuple[deque[HostTransfer], ...] = (deque(), deque())
        self._waited = 0.0
        self._peak_needed = 0
        self._link: Link | None = None
        self._process = os.getpid()
        self._lock = threading.RLock()  # of free pages and ended transfers
        self._queues: list[queue.SimpleQueue[HostTransfer | None]] = [queue.SimpleQueue() for _ in range(2)]
        threads = [
            threading.Thread(target=_work, args=(tasks,), name=f"mempool-copy-{name}", daemon=True)
            for tasks, name in zip(self._queues, ("out", "in"), strict=True)
        ]
        for thread in threads:
            thread.start()
        self._end = weakref.finalize(self, _end, self._queues, threads)

    def bytes_of(self, storage: Any) -> StorageBytes:
        """See `Engine`."""
        return StorageBytes(storage)

    def address(self, copy: Any) -> int:
        """See `Engine`."""
        return int(self._memory.address + copy.at)

    def offload(self, data: torch.Tensor | StorageBytes, at: int = -1) -> tuple[ArenaCopy, HostTransfer]:
        """See `Engine`; the data lies on the CPU."""
        self._release_finished()
        size = data.numel()
        copied = self._allocate(size, at)
        moving = HostTransfer(size, copied, self.address(copied), _address(data), data)
        copied.filled_by = moving
        self._request(_OUT, moving)
        return copied, moving

    def reload(self, copy: Any, data: torch.Tensor | StorageBytes) -> HostTransfer:
        """See `Engine`."""
        after = copy.filled_by if copy.filled_by is not None and not copy.filled_by.done else None
        moving = HostTransfer(copy.size, copy, _address(data), self._memory.address + copy.at, data, after)
        self._request(_BACK, moving)
        return moving

    @property
    def sync_copier(self) -> HostEngine:
        """See `Engine`."""
        return self

    def _allocate(self, size: int, at: int) -> ArenaCopy:
        """Return an empty copy; the memory is freed with the last reference."""
        with self._lock:  # no release of free pages meanwhile
            memory = self._free_list.take(size, at)
        if memory is None:
            raise HostFullError(size, self._memory.size)
        self._memory.mark_touched(memory.at, size)
        return ArenaCopy(size, memory.at, memory)

    def offload_now(self, tensor: torch.Tensor, size: int, at: int = -1) -> ArenaCopy:
        """See `SyncCopier`."""
        copied = self._allocate(size, at)
        ctypes.memmove(self.address(copied), _address(tensor), size)
        return copied

    def reload_now(self, copy: Any, tensor: torch.Tensor) -> None:
        """See `SyncCopier`."""
        ctypes.memmove(_address(tensor), self._memory.address + copy.at, copy.size)

    def wait(self, transfer: Any) -> float:
        """See `Engine`."""
        waited = 0.0
        if not transfer.done:
            began = time.perf_counter()
            if os.getpid() == self._process:
                transfer.ended.wait()
            else:  # the copy's own offload may be unfinished
                for moving in (transfer.copied.filled_by, transfer):
                    if moving is not None and not moving.done:
                        moving.run()
            waited = time.perf_counter() - began
            transfer.waited += waited
            self._waited += waited
        transfer.data = None
        return waited

    def drop(self, copy: Any) -> None:
        """See `Engine`."""
        copy.memory = None

    def native_copies(self, size: int) -> None:
        """See `Engine`."""

    def fence(self) -> None:
        """See `Engine`; without effect, since CPU work is synchronous."""

    def note_stream(self) -> None:
        """See `Engine`; without effect, since a CPU has no streams."""

    def current_stream(self) -> None:
        """See `Engine`."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """See `Engine`."""
        return contextlib.nullcontext(stream)

    def begin_capture(self) -> None:
        """See `Engine`; without effect, as the next three methods, since a CPU captures no graphs."""

    def end_capture(self) -> None:
        """See `Engine`."""

    def is_capturing(self) -> bool:
        """See `Engine`."""
        return False

    def check_reload(self) -> None:
        """See `Engine`."""

    def waited(self, transfer: Any) -> float:
        """See `Engine`."""
        return float(transfer.waited)

    def take_waits(self) -> list[float]:
        """See `Engine`; `wait` returns all waits."""
        return []

    def mark(self, prepare: Callable[[Any], object] | None = None) -> float:  # noqa: ARG002
        """Return the time of a clock that stops while the program waits for copies."""
        self._release_finished()
        return time.perf_counter() - self._waited

    def seconds(self, marks: list[float]) -> list[float]:
        """See `Engine`."""
        return [max(after - before, 0.0) for before, after in itertools.pairwise(marks)]

    def reserve(self, size: int) -> None:
        """See `Engine`; without effect, since pages are allocated when touched."""

    def end_iteration(self) -> None:
        """See `Engine`."""
        self._release_finished()
        with self._lock:
            before, self._peak_needed = self._peak_needed, self._free_list.take_peak()
            self._memory.release_excess(max(before, self._peak_needed), self._free_list)

    @property
    def host_bytes(self) -> int:
        """See `Engine`."""
        return self._free_list.used

    def link(self) -> Link:
        """See `Engine`; measured from memory to memory, with this engine's threads."""
        if self._link is None:
            self._link = measure(_TimedCopies(self._run_or_queue))
        return self._link

    def close(self) -> None:
        """See `Engine`; also called when the engine or the interpreter ends."""
        self._end()

    def _request(self, way: int, moving: HostTransfer) -> None:
        self._run_or_queue(way, moving)
        self._in_flight[way].append(moving)

    def _run_or_queue(self, way: int, moving: HostTransfer) -> None:
        if os.getpid() == self._process and self._end.alive:
            self._queues[way].put(moving)
        else:  # without threads: in a forked child, or at the interpreter's end
            moving.run()

    def _release_finished(self) -> None:
        """Release the data of ended copies without waits."""
        for flying in self._in_flight:
            if flying:
                with self._lock:
                    while flying and (flying[0].done or flying[0].data is None):
                        flying.popleft().data = None


def _work(tasks: queue.SimpleQueue[HostTransfer | None]) -> None:
    while (moving := tasks.get()) is not None:
        if moving.predecessor is not None:
            moving.predecessor.ended.wait()
            moving.predecessor = None
        moving.run()


def _end(queues: list[queue.SimpleQueue[HostTransfer | None]], threads: list[threading.Thread]) -> None:
    """Stop the threads after their copies, before the interpreter ends."""
    for tasks in queues:
        tasks.put(None)
    for thread in threads:
        thread.join()


def _address(data: Any) -> int:
    """Return the address of a tensor or of a storage's bytes, bypassing patches of `data_ptr`."""
    of_tensor, of_storage = _functions()
    return of_storage(data.storage) if isinstance(data, StorageBytes) else of_tensor(data)


@functools.cache
def _functions() -> tuple[Callable[[Any], int], Callable[[Any], int]]:
    import torch

    return torch._C.TensorBase.data_ptr, torch._C.StorageBase.data_ptr


class _TimedCopies:
    """Implementation of `TimedCopies` with the engine's threads, on more memory than the caches."""

    def __init__(self, start: Callable[[int, HostTransfer], None]) -> None:
        self._start, self._memory, self._turn = start, PrivateMemory(4 * _TIMED_BYTES), 0
        ctypes.memset(self._memory.address, 1, self._memory.size)

    def timed(self, size: int, *, out: bool, back: bool) -> float:
        """See `TimedCopies`."""
        self._turn = (self._turn + size) % (_TIMED_BYTES - size + 1)
        a, b, c, d = (self._memory.address + self._turn + side * _TIMED_BYTES for side in range(4))
        began = time.perf_counter()
        copies = [(_OUT, a, b)] * out + [(_BACK, c, d)] * back
        transfers = [  # they keep the memory, even after a Ctrl-C
            (way, HostTransfer(size, ArenaCopy(size, 0), to, of, self._memory)) for way, to, of in copies
        ]
        for way, transfer in transfers:
            self._start(way, transfer)
        for _, transfer in transfers:
            transfer.ended.wait()
        return time.perf_counter() - began
