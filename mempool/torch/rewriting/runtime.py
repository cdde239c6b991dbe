"""What is away and what is coming back while rewritten graphs run: tickets of copies.

A graph holds no tensor that is away, but a ticket: a tensor of the host with one number. The host's bytes
live as long as the ticket does. So a backward pass may run twice or never, and each forward pass has its own.
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
from mempool.torch.rewriting.forms import Form, extent, flat
from mempool.torch.swapping.attached import engine_for
from mempool.torch.swapping.engine import HostFullError
from mempool.torch.swapping.host_memory import default_host_limit

if TYPE_CHECKING:
    from mempool.torch.swapping.engine import Engine, HostCopy, Transfer


@dataclass(eq=False)
class Away:
    """Bytes that are on the host, or on their way.

    Attributes:
        engine: who copies them.
        form: of the tensor that they are, which need not be what a graph was traced with.
        copy: the host's side; None: the host was full, and ``data`` stays.
        transfer: the copy out; None once it has been waited for.
        data: the device's bytes, only while nobody has waited, or where the host was full.
        tickets: how many tickets name them.
    """

    engine: Engine
    form: Form
    copy: HostCopy | None
    transfer: Transfer | None
    data: torch.Tensor | None
    tickets: int = 0


@dataclass(eq=False)
class Coming:
    """A tensor that is being filled.

    Attributes:
        engine: who fills it.
        tensor: what is waited for.
        source: what is being filled: the same, or, of other strides, what it is filled from at the end.
        transfer: the copy; None once it has been waited for.
        tickets: how many tickets name it.
    """

    engine: Engine
    tensor: torch.Tensor
    source: torch.Tensor
    transfer: Transfer | None
    tickets: int = 0


@dataclass
class Moved:
    """Counts since the beginning; bytes and seconds.

    Attributes:
        out_bytes: copied to the host.
        in_bytes: copied back.
        outs: copies out.
        ins: copies back.
        waited_seconds: how long the program waited for copies, where it is the program that waits.
        host_full: copies that the host had no room for: what should have left has stayed.
    """

    out_bytes: int = 0
    in_bytes: int = 0
    outs: int = 0
    ins: int = 0
    waited_seconds: float = 0.0
    host_full: int = 0


@dataclass(eq=False)
class Runtime:
    """The copies of a process.

    Attributes:
        moved: what was copied, since somebody last set it anew.
    """

    moved: Moved = field(default_factory=Moved)
    _engines: dict[tuple[torch.device, int], Engine] = field(default_factory=dict)
    _held: dict[int, Away | Coming] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _dead: deque[int] = field(default_factory=deque)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def engine(self, device: torch.device, host_limit: int = 0) -> Engine:
        """Who copies between a device and at most so many bytes of the host; 0: half of what is free."""
        if device.type == "cpu":
            device = torch.device("cpu")
        with self._lock:
            if (device, host_limit) not in self._engines:
                most = host_limit or default_host_limit()
                self._engines[device, host_limit] = engine_for(device, most)
            return self._engines[device, host_limit]

    @property
    def away(self) -> int:
        """How many copies the host has."""
        self._bury()
        return sum(isinstance(held, Away) for held in self._held.values())

    @property
    def host_bytes(self) -> int:
        """What the engines have taken of the host's memory, bytes."""
        self._bury()
        return sum(engine.host_bytes for engine in self._engines.values())

    def _ticket(self, number: int) -> torch.Tensor:
        """A tensor that names what is held, for as long as its memory lives."""
        ticket = torch.full((1,), number, dtype=torch.int64)
        with self._lock:
            self._held[number].tickets += 1
        weakref.finalize(ticket.untyped_storage(), self._dead.append, number).atexit = False
        return ticket

    def _bury(self) -> None:
        """Let go of what tickets named that are gone. They go at any moment, in any thread, with any lock."""
        with self._lock:
            while self._dead:
                held = self._held[number := self._dead.popleft()]
                held.tickets -= 1
                if not held.tickets:
                    del self._held[number]
                    if isinstance(held, Away) and held.copy is not None:
                        held.engine.drop(held.copy)

    def _of(self, ticket: torch.Tensor, kind: type) -> Any:
        self._bury()  # a copy of a ticket does not keep what it names
        held = self._held.get(int(ticket))
        if not isinstance(held, kind):
            raise UsageError(
                "what a compiled graph had sent to the host is gone: hooks on saved tensors, such as "
                "save_on_cpu, must not copy what a graph with a limit saves"
            )
        return held

    def out(self, tensor: torch.Tensor, host_limit: int, at: int = -1) -> torch.Tensor:
        """Begin to copy a tensor to the host; its ticket. ``at``: where it was planned to lie, or -1."""
        engine, data = self.engine(tensor.device, host_limit), flat(tensor)
        with self._lock:
            self._bury()
            copy, transfer = None, None
            try:
                copy, transfer = engine.out(data, at)
                self.moved.outs += 1
                self.moved.out_bytes += len(data)
            except HostFullError:
                self._is_full()
            number = next(self._numbers)
            form = Form.of(tensor)
            self._held[number] = Away(engine, form, copy, transfer, data if copy is None else None)
            return self._ticket(number)

    def sent(self, tensor: torch.Tensor, host_limit: int, at: int = -1) -> torch.Tensor:
        """Copy a tensor to the host, at once where that is quicker; its ticket, as of `released`."""
        engine = self.engine(tensor.device, host_limit)
        if (own := engine.own) is None:
            return self.released(self.out(tensor, host_limit, at))
        form, size, copy = Form.of(tensor), extent(tensor), None
        with self._lock:
            self._bury()
            try:
                copy = own.out_now(tensor, size, at)
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
        """Let what comes now come after the copy; a ticket of its own."""
        held = self._of(ticket, Away)
        transfer, held.transfer = held.transfer, None
        if transfer is not None:
            self.moved.waited_seconds += held.engine.wait(transfer)
        return self._ticket(int(ticket))

    def back(self, ticket: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy into a tensor of as many elements as what left; a ticket of that.

        A compiler of graphs may have chosen other strides for what left than the graph says, and what was
        traced of an operation may be of another type than what it makes: that comes back as it left.
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
                transfer = held.engine.back(held.copy, data)
                self.moved.ins += 1
                self.moved.in_bytes += len(data)
            number = next(self._numbers)
            self._held[number] = Coming(held.engine, tensor, source, transfer)
            return self._ticket(number)

    def fetched(self, ticket: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with what left in it, copied at once where that is quicker; arguments as of `back`."""
        held: Away = self._of(ticket, Away)
        own, tensor = held.engine.own, held.form.typed(tensor)
        if own is None or held.copy is None or held.transfer or not held.form.fits(tensor):
            return self.arrived(self.back(ticket, tensor))
        own.back_now(held.copy, tensor)
        self.moved.ins += 1
        self.moved.in_bytes += held.copy.size
        return tensor

    def arrived(self, ticket: torch.Tensor) -> torch.Tensor:
        """The tensor, for what comes from now on."""
        held = self._of(ticket, Coming)
        transfer, held.transfer = held.transfer, None
        if transfer is not None:
            self.moved.waited_seconds += held.engine.wait(transfer)
        tensor, source = held.tensor, held.source
        held.tensor = held.source = None
        return tensor if source is tensor else tensor.copy_(source)


#: Of this process.
RUNTIME = Runtime()
