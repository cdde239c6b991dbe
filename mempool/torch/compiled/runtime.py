"""Runtime of rewritten graphs: runs the copies, which graphs refer to by tickets.

In a graph, a ticket (a host tensor with one number) represents an offloaded tensor. The host copy lives as
long as the ticket. So a backward pass may run twice or never, and each forward pass has separate copies.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mempool.errors import UsageError
from mempool.torch.offload.engine import HostFullError
from mempool.torch.offload.engines import create_engine
from mempool.torch.offload.host_memory import default_host_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.torch.offload.engine import Engine, HostCopy, Transfer


@dataclass(frozen=True)
class TensorLayout:
    """Layout that an offloaded tensor must have after the reload.

    Attributes:
        size: the size of each dimension.
        stride: the stride of each dimension, in elements.
        dtype: the type of the elements.
    """

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        """Return the layout of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return true if a tensor has this layout; strides of size-1 dimensions do not matter."""
        if (tensor.shape, tensor.dtype) != (self.size, self.dtype):
            return False
        return self.stride == tensor.stride() or all(
            n == 1 or a == b for n, a, b in zip(self.size, self.stride, tensor.stride(), strict=True)
        )

    def with_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a new one of the same size and strides with the right element type."""
        if tensor.dtype == self.dtype:
            return tensor
        return empty_tensor(tensor.shape, tensor.stride(), self.dtype, tensor.device)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor of this layout."""
        return empty_tensor(self.size, self.stride, self.dtype, device)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes from a tensor's first to last element, in memory order: uint8[n]."""
    start = tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), start, (extent(tensor),), (1,)
    )


def empty_tensor(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return an uninitialized tensor, even in PyTorch's deterministic mode."""
    if not torch.are_deterministic_algorithms_enabled():
        return torch.empty_strided(size, stride, dtype=dtype, device=device)
    tensor = torch.empty(0, dtype=dtype, device=device)
    storage = tensor.untyped_storage()  # a new CPU storage would bypass the installed allocator
    storage.resize_(dtype.itemsize * _elements(size, stride))
    return tensor.set_(storage, 0, size, stride)


def extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first to its last element."""
    if tensor.is_contiguous():
        return int(tensor.nbytes)
    return int(_elements(tensor.shape, tensor.stride()) * tensor.element_size())


def _elements(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the distance from a tensor's first to its last element, both included, in elements."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


@dataclass(eq=False)
class OffloadedTensor:
    """A copy on the host, or on the way to the host.

    Attributes:
        engine: the engine that makes the copy.
        layout: the layout of the copied tensor, which may differ from the traced layout.
        copy: the host memory; None if the host was full, in which case ``data`` stays.
        transfer: the offload; None after the wait.
        data: the bytes on the device if the host was full; otherwise None.
        tickets: number of tickets that refer to this copy.
    """

    engine: Engine
    layout: TensorLayout
    copy: HostCopy | None
    transfer: Transfer | None
    data: torch.Tensor | None
    tickets: int = 0


@dataclass(eq=False)
class ReloadingTensor:
    """A tensor that is being reloaded.

    Attributes:
        engine: the engine that fills the tensor.
        tensor: the reloaded tensor.
        source: the destination of the transfer: `tensor`, or a tensor of other strides that is copied into
            `tensor` at the end.
        transfer: the reload; None after the wait.
        tickets: number of tickets that refer to this tensor.
    """

    engine: Engine
    tensor: torch.Tensor
    source: torch.Tensor
    transfer: Transfer | None
    tickets: int = 0


@dataclass
class TransferCounters:
    """Counters since the start, in bytes and seconds.

    Attributes:
        offload_bytes: bytes offloaded to the host.
        reload_bytes: bytes reloaded.
        offloads: number of offloads.
        reloads: number of reloads.
        wait_seconds: time that the program waited for copies; on a GPU, streams wait instead.
        host_full: copies for which the host had no room, so that the value stayed on the device.
    """

    offload_bytes: int = 0
    reload_bytes: int = 0
    offloads: int = 0
    reloads: int = 0
    wait_seconds: float = 0.0
    host_full: int = 0


@dataclass(eq=False)
class TransferRuntime:
    """The offloaded and reloading tensors of a process, by ticket number, and the engines that copy them.

    Attributes:
        counters: counters of the copies since `counters` was last replaced.
        engines: the engine of each device and host limit.
    """

    counters: TransferCounters = field(default_factory=TransferCounters)
    engines: dict[tuple[torch.device, int], Engine] = field(default_factory=dict)
    _entries: dict[int, OffloadedTensor | ReloadingTensor] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _dead: deque[int] = field(default_factory=deque)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def engine(self, device: torch.device, host_limit: int = 0) -> Engine:
        """Return the engine for a device and a host limit in bytes; 0: half of the free host memory."""
        if device.type == "cpu":
            device = torch.device("cpu")
        with self._lock:
            if (device, host_limit) not in self.engines:
                most = host_limit or default_host_limit()
                self.engines[device, host_limit] = create_engine(device, most)
            return self.engines[device, host_limit]

    @property
    def host_copies(self) -> int:
        """Return the number of copies on the host."""
        self._release_dead()
        return sum(isinstance(entry, OffloadedTensor) for entry in self._entries.values())

    @property
    def host_bytes(self) -> int:
        """Return the host memory in bytes that the engines use."""
        self._release_dead()
        return sum(engine.host_bytes for engine in self.engines.values())

    def _ticket(self, number: int) -> torch.Tensor:
        """Return a tensor that refers to the entry `number` for as long as the tensor's memory lives."""
        ticket = torch.full((1,), number, dtype=torch.int64)
        with self._lock:
            self._entries[number].tickets += 1
        weakref.finalize(ticket.untyped_storage(), self._dead.append, number).atexit = False
        return ticket

    def _release_dead(self) -> None:
        """Release the entries whose tickets are gone.

        Python may free a ticket at any moment, in any thread, with any lock held, so this is not its
        destructor's job.
        """
        with self._lock:
            while self._dead:
                entry = self._entries[number := self._dead.popleft()]
                entry.tickets -= 1
                if not entry.tickets:
                    del self._entries[number]
                    if isinstance(entry, OffloadedTensor) and entry.copy is not None:
                        entry.engine.drop(entry.copy)
                    if not self._entries:  # the end of a step
                        for engine in self.engines.values():
                            engine.end_iteration()

    def _entry(self, ticket: torch.Tensor, kind: type) -> Any:
        self._release_dead()  # a ticket's copy does not keep the entry
        entry = self._entries.get(int(ticket))
        if not isinstance(entry, kind):
            raise UsageError(
                "the copy that a compiled graph made on the host is gone: hooks on saved tensors, such as "
                "save_on_cpu, must not copy the tensors that a graph with a limit saves"
            )
        return entry

    def offload(self, tensor: torch.Tensor, host_limit: int, at: int = -1) -> torch.Tensor:
        """Start the offload of a tensor; return a ticket. ``at``: the planned host offset, or -1."""
        engine, data = self.engine(tensor.device, host_limit), byte_view(tensor)
        with self._lock:
            self._release_dead()
            copy, transfer = None, None
            try:
                copy, transfer = engine.offload(data, at)
                self.counters.offloads += 1
                self.counters.offload_bytes += len(data)
            except HostFullError:
                self._warn_host_full()
            number = next(self._numbers)
            layout = TensorLayout.of(tensor)
            self._entries[number] = OffloadedTensor(
                engine, layout, copy, transfer, data if copy is None else None
            )
            return self._ticket(number)

    def offload_sync(self, tensor: torch.Tensor, host_limit: int, at: int = -1) -> torch.Tensor:
        """Offload a tensor, synchronously if that is quicker; return the ticket of the copy."""
        engine = self.engine(tensor.device, host_limit)
        if (copier := engine.sync_copier) is None:
            return self.offload_wait(self.offload(tensor, host_limit, at))
        layout, size, copy = TensorLayout.of(tensor), extent(tensor), None
        with self._lock:
            self._release_dead()
            try:
                copy = copier.offload_now(tensor, size, at)
                self.counters.offloads += 1
                self.counters.offload_bytes += size
            except HostFullError:
                self._warn_host_full()
            number = next(self._numbers)
            self._entries[number] = OffloadedTensor(
                engine, layout, copy, None, byte_view(tensor) if copy is None else None
            )
            return self._ticket(number)

    def _warn_host_full(self) -> None:
        self.counters.host_full += 1
        warnings.warn(
            "the host has no room for a copy: the value stays on the device, and the limit may be exceeded; "
            "models with the same host_limit share that",
            stacklevel=2,
        )

    def offload_wait(self, ticket: torch.Tensor) -> torch.Tensor:
        """Order later work after the offload of a ticket; return a new ticket for the copy."""
        entry = self._entry(ticket, OffloadedTensor)
        transfer, entry.transfer = entry.transfer, None
        if transfer is not None:
            self.counters.wait_seconds += entry.engine.wait(transfer)
        return self._ticket(int(ticket))

    def reload(self, ticket: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Start the reload into a tensor with as many elements as the offloaded one; return a ticket.

        The reloaded tensor has the layout of the offloaded tensor. That layout may differ from the graph's: a
        graph compiler may choose other strides, and an operation may be traced with another type than its
        real result.
        """
        entry: OffloadedTensor = self._entry(ticket, OffloadedTensor)
        tensor = entry.layout.with_dtype(tensor)
        source = tensor if entry.layout.fits(tensor) else entry.layout.empty(tensor.device)
        data = byte_view(source)
        with self._lock:
            transfer = None
            if entry.copy is None:
                data.copy_(entry.data)
            else:
                transfer = entry.engine.reload(entry.copy, data)
                self.counters.reloads += 1
                self.counters.reload_bytes += len(data)
            number = next(self._numbers)
            self._entries[number] = ReloadingTensor(entry.engine, tensor, source, transfer)
            return self._ticket(number)

    def reload_sync(self, ticket: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Reload a tensor, synchronously if that is quicker; the arguments are those of `reload`."""
        entry: OffloadedTensor = self._entry(ticket, OffloadedTensor)
        copier, tensor = entry.engine.sync_copier, entry.layout.with_dtype(tensor)
        if copier is None or entry.copy is None or entry.transfer or not entry.layout.fits(tensor):
            return self.reload_wait(self.reload(ticket, tensor))
        copier.reload_now(entry.copy, tensor)
        self.counters.reloads += 1
        self.counters.reload_bytes += entry.copy.size
        return tensor

    def reload_wait(self, ticket: torch.Tensor) -> torch.Tensor:
        """Return the reloaded tensor, ordered before all later work."""
        entry = self._entry(ticket, ReloadingTensor)
        transfer, entry.transfer = entry.transfer, None
        if transfer is not None:
            self.counters.wait_seconds += entry.engine.wait(transfer)
        tensor, source = entry.tensor, entry.source
        entry.tensor = entry.source = None
        return tensor if source is tensor else tensor.copy_(source)


#: The copies of this process.
RUNTIME = TransferRuntime()
