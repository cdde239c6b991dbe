"""Run the copies of rewritten graphs; graphs refer to copies by tickets.

A graph holds no offloaded tensor but a ticket: a host tensor with one number. The host copy lives as long as
the ticket. So a backward pass may run twice or never, and each forward pass has separate copies.
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
from mempool.torch.compiled.tensor_layout import Form, extent, flat
from mempool.torch.offload.engine import HostFullError, create_engine
from mempool.torch.offload.host_memory import default_host_limit

if TYPE_CHECKING:
    from mempool.torch.offload.engine import Engine, HostCopy, Transfer


@dataclass(eq=False)
class Away:
    """A copy on the host, or on the way to the host.

    Attributes:
        engine: the engine that makes the copy.
        form: the form of the copied tensor, which may differ from the traced form.
        copy: the host memory; None if the host was full, in which case ``data`` stays.
        transfer: the offload; None after the wait.
        data: the bytes on the device if the host was full; otherwise None.
        tickets: number of tickets that refer to this copy.
    """

    engine: Engine
    form: Form
    copy: HostCopy | None
    transfer: Transfer | None
    data: torch.Tensor | None
    tickets: int = 0


@dataclass(eq=False)
class Coming:
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
class Moved:
    """Counters since the start, in bytes and seconds.

    Attributes:
        out_bytes: bytes offloaded to the host.
        in_bytes: bytes reloaded.
        outs: number of offloads.
        ins: number of reloads.
        waited_seconds: time that the program waited for copies, where the program itself waits.
        host_full: copies for which the host had no room, so that the value stayed on the device.
    """

    out_bytes: int = 0
    in_bytes: int = 0
    outs: int = 0
    ins: int = 0
    waited_seconds: float = 0.0
    host_full: int = 0


@dataclass(eq=False)
class Runtime:
    """The offloaded and reloading tensors of a process, by ticket number, and the engines that copy them.

    Attributes:
        moved: counters of the copies since `moved` was last replaced.
    """

    moved: Moved = field(default_factory=Moved)
    _engines: dict[tuple[torch.device, int], Engine] = field(default_factory=dict)
    _held: dict[int, Away | Coming] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _dead: deque[int] = field(default_factory=deque)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def engine(self, device: torch.device, host_limit: int = 0) -> Engine:
        """Return the engine for a device and a host limit in bytes; 0: half of the free host memory."""
        if device.type == "cpu":
            device = torch.device("cpu")
        with self._lock:
            if (device, host_limit) not in self._engines:
                most = host_limit or default_host_limit()
                self._engines[device, host_limit] = create_engine(device, most)
            return self._engines[device, host_limit]

    @property
    def away(self) -> int:
        """Return the number of copies on the host."""
        self._bury()
        return sum(isinstance(held, Away) for held in self._held.values())

    @property
    def host_bytes(self) -> int:
        """Return the host memory in bytes that the engines use."""
        self._bury()
        return sum(engine.host_bytes for engine in self._engines.values())

    def _ticket(self, number: int) -> torch.Tensor:
        """Return a tensor that refers to the entry `number` for as long as the tensor's memory lives."""
        ticket = torch.full((1,), number, dtype=torch.int64)
        with self._lock:
            self._held[number].tickets += 1
        weakref.finalize(ticket.untyped_storage(), self._dead.append, number).atexit = False
        return ticket

    def _bury(self) -> None:
        """Release the entries whose tickets are gone.

        Tickets die at any moment, in any thread, and with any lock held.
        """
        with self._lock:
            while self._dead:
                held = self._held[number := self._dead.popleft()]
                held.tickets -= 1
                if not held.tickets:
                    del self._held[number]
                    if isinstance(held, Away) and held.copy is not None:
                        held.engine.drop(held.copy)

    def _of(self, ticket: torch.Tensor, kind: type) -> Any:
        self._bury()  # a copy of a ticket does not keep the entry alive
        held = self._held.get(int(ticket))
        if not isinstance(held, kind):
            raise UsageError(
                "what a compiled graph had sent to the host is gone: hooks on saved tensors, such as "
                "save_on_cpu, must not copy what a graph with a limit saves"
            )
        return held

    def out(self, tensor: torch.Tensor, host_limit: int, at: int = -1) -> torch.Tensor:
        """Start the offload of a tensor; return a ticket. ``at``: the planned host offset, or -1."""
        engine, data = self.engine(tensor.device, host_limit), flat(tensor)
        with self._lock:
            self._bury()
            copy, transfer = None, None
            try:
                copy, transfer = engine.offload(data, at)
                self.moved.outs += 1
                self.moved.out_bytes += len(data)
            except HostFullError:
                self._is_full()
            number = next(self._numbers)
            form = Form.of(tensor)
            self._held[number] = Away(engine, form, copy, transfer, data if copy is None else None)
            return self._ticket(number)

    def sent(self, tensor: torch.Tensor, host_limit: int, at: int = -1) -> torch.Tensor:
        """Offload a tensor, synchronously where that is quicker; return a ticket like that of `released`."""
        engine = self.engine(tensor.device, host_limit)
        if (own := engine.sync_copier) is None:
            return self.released(self.out(tensor, host_limit, at))
        form, size, copy = Form.of(tensor), extent(tensor), None
        with self._lock:
            self._bury()
            try:
                copy = own.offload_now(tensor, size, at)
                self.moved.outs += 1
                self.moved.out_bytes += size
            except HostFullError:
                self._is_full()
            number = next(self._numbers)
            self._held[number] = Away(engine, form, copy, None, flat(tensor) if copy is None else None)
            return self._ticket(number)

    def _is_full(self) -> None:
        self.moved.host_full += 1
        warnings.warn(
            "the host has no room for a copy: what should leave stays, and the limit may be exceeded; "
            "models with the same host_limit share that",
            stacklevel=2,
        )

    def released(self, ticket: torch.Tensor) -> torch.Tensor:
        """Order later work after the offload of a ticket; return a new ticket for the copy."""
        held = self._of(ticket, Away)
        transfer, held.transfer = held.transfer, None
        if transfer is not None:
            self.moved.waited_seconds += held.engine.wait(transfer)
        return self._ticket(int(ticket))

    def back(self, ticket: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Start the reload into a tensor with as many elements as the offloaded one; return a ticket.

        A graph compiler may have chosen other strides for the offloaded tensor than the graph says, and an
        operation may have been traced with another type than the real result. The tensor is reloaded in the
        form in which the tensor was offloaded.
        """
        held: Away = self._of(ticket, Away)
        tensor = held.form.typed(tensor)
        source = tensor if held.form.fits(tensor) else held.form.room(tensor.device)
        data = flat(source)
        with self._lock:
            transfer = None
            if held.copy is None:
                data.copy_(held.data)
            else:
                transfer = held.engine.reload(held.copy, data)
                self.moved.ins += 1
                self.moved.in_bytes += len(data)
            number = next(self._numbers)
            self._held[number] = Coming(held.engine, tensor, source, transfer)
            return self._ticket(number)

    def fetched(self, ticket: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Reload a tensor, synchronously where that is quicker; the arguments are those of `back`."""
        held: Away = self._of(ticket, Away)
        own, tensor = held.engine.sync_copier, held.form.typed(tensor)
        if own is None or held.copy is None or held.transfer or not held.form.fits(tensor):
            return self.arrived(self.back(ticket, tensor))
        own.reload_now(held.copy, tensor)
        self.moved.ins += 1
        self.moved.in_bytes += held.copy.size
        return tensor

    def arrived(self, ticket: torch.Tensor) -> torch.Tensor:
        """Return the reloaded tensor, ordered before all later work."""
        held = self._of(ticket, Coming)
        transfer, held.transfer = held.transfer, None
        if transfer is not None:
            self.moved.waited_seconds += held.engine.wait(transfer)
        tensor, source = held.tensor, held.source
        held.tensor = held.source = None
        return tensor if source is tensor else tensor.copy_(source)


#: The copies of this process.
RUNTIME = Runtime()
