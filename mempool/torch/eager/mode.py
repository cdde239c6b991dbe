"""A dispatch mode that offloads storages to the host and reloads them, to hold a device memory limit."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mempool.logs import log
from mempool.recording.torch.ledger import is_wrapper, storages_in
from mempool.torch.eager.arena_admission import Arrival
from mempool.torch.eager.bypass import Bypass
from mempool.torch.eager.dispatcher_patches import Escapes
from mempool.torch.eager.eviction_policy import Governor
from mempool.torch.eager.iteration_detector import Repeats
from mempool.torch.eager.iterations import Iterations
from mempool.torch.eager.op_footprints import SAMPLES, Counters, Need, Needs
from mempool.torch.eager.operator_traits import PLAIN, Kind, is_compiled
from mempool.torch.eager.pool_headroom import Room
from mempool.torch.eager.report import SwapCounts, said
from mempool.torch.eager.storages import AWAY, COMING, HERE, Held, Storages, bytes_of, storage_of
from mempool.torch.eager.threads import Threads, inside
from mempool.torch.eager.transfers import Mover
from mempool.torch.optimizer_steps import Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from mempool import _core
    from mempool.torch.eager.undeclared_effects import Odd
    from mempool.torch.offload.engine import Engine

_NONE: dict[str, Any] = {}


class Swapper(TorchDispatchMode):
    """Dispatch mode that keeps the memory of one device's storages within a limit.

    Before each operation, the mode reloads all storages among the arguments, whatever a plan says, so no
    result ever depends on a plan. Storages give up device memory only at that moment: C++ code may use the
    storages that an operation made until the next operation begins. An iteration like the recorded one
    follows a schedule, which moves storages ahead of time; in other iterations, the least recently used
    storages are evicted when room is needed.

    Attributes:
        limit_bytes: limit of the storages' device memory, bytes.
        counts: counters of transfers, evictions and waits.
        marked: whether the program itself marks the ends of iterations, instead of the first optimizer's
            steps.
        storages: registry of the known storages.
        iterations: the recurring iterations of the program, and their plans.
        mover: offloads and reloads storages.
        bypass: lets operations skip the mode while nothing has to move; None: the mode sees every operation.
        escapes: patches that reload storages for PyTorch code that accesses memory past the dispatcher.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        engine: Engine,
        device: torch.device,
        limit_bytes: int,
        *,
        alignment: int = 64,
        host_bytes: int | None = None,
        client: _core.Client | None = None,
        ended: Callable[[], None] | None = None,
        anew: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the mode; the mode is active inside its ``with`` block.

        Args:
            engine: copies between device and host.
            device: device whose storages are swapped.
            limit_bytes: most bytes of device memory for the storages.
            alignment: sizes are rounded up to a multiple of this, bytes.
            host_bytes: most bytes of host memory that plans use; None: no limit.
            client: client of the pool that serves the device. Workspaces of running operations are measured
                and count; memory that the pool serves to unknown storages is subtracted from the limit.
            ended: called when an optimizer's step ends an iteration that the program does not mark.
            anew: makes the pool forget its plans.
        """
        super().__init__()
        self.engine = engine
        self.counts = SwapCounts()
        self.limit_bytes = limit_bytes
        self.storages = Storages(device, alignment, None if client is None else client.pool.owns)
        self._client = client
        self._tell_ended = ended
        self.mover = Mover(engine, self.storages, self.counts)
        self._room = None if client is None else Room(client, self.storages, limit_bytes)
        self.iterations = Iterations(
            engine, self.storages, self.mover, self.counts, limit_bytes, host_bytes, client, self._room
        )
        self._governor = Governor(
            self.storages, self.mover, self.counts, limit_bytes, self.iterations.until, self._room
        )
        self._arrival: Arrival | None = None
        self.bypass: Bypass | None = None
        if client is not None and self._room is not None:  # both are None, or neither
            self._arrival = Arrival(
                client, self._room, self.storages, self.iterations, self._governor, self.mover, anew
            )
            self.bypass = Bypass(
                self,
                client,
                self._room,
                self.storages,
                self.iterations,
                self.mover,
                self._arrival,
                self.counts,
            )
        self._known = self.storages.known
        self._kinds: dict[int, Kind] = {}
        self._wrappers: dict[Any, bool] = {}
        self._needs = Needs(None if client is None else Counters(client), alignment)
        self._clock = 0
        self._optimizer: Any = None
        self._listener: Listener | None = None
        self._ended = False
        self._repeats: Repeats | None = Repeats()
        self.marked = False
        self._told = self._told_of_compiler = False
        self._blank: dict[int, Held] = {}
        self._most = 0  # high-water mark of this iteration's bytes, workspaces included
        self._is_partial = False  # the beginning of this iteration was not seen
        self.escapes = Escapes(self.storages, self.mover, self._know)
        self._threads = Threads(self)

    # --- iterations

    def __enter__(self) -> Self:
        self._ended = False
        self._listener = Listener(before=self._steps, after=self._stepped)
        self.mover.thread = threading.get_ident()
        self.escapes.install()
        self._threads.install()
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self.end()

    def end(self) -> None:
        """Reload every storage, and stop handling operations."""
        self._ended = True
        if self.bypass is not None:
            self.bypass.end()
        if self._listener is not None:
            self._listener.remove()
        self.bring_all()
        self.iterations.close()
        self._threads.remove()
        self.escapes.remove()
        if self._room is not None:
            self._room.end()

    def stop(self) -> None:
        """Stop all evictions; offloaded storages are reloaded on demand."""
        if self.bypass is not None:
            self.bypass.abandon()
        self.limit_bytes = self._governor.limit_bytes = self.iterations.limit_bytes = 1 << 62
        if self._room is not None:
            self._room.end()
        self.iterations.forget()

    def _steps(self, _: torch.optim.Optimizer) -> None:
        """Stop the period detection before an optimizer steps: training's repetitions are no iterations."""
        if threading.get_ident() == self.mover.thread:
            self._marks()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if threading.get_ident() != self.mover.thread:
            self._tell_of_thread()
        if self.marked or threading.get_ident() != self.mover.thread:
            return
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            self.step()
            if self._tell_ended is not None:
                self._tell_ended()

    def _tell_of_thread(self) -> None:
        if not self._told:
            log.warning(
                "an optimizer steps in %s, not in the thread that set the limit: what is trained there is "
                "not swapped; install the pool in the thread that trains",
                threading.current_thread().name,
            )
        self._told = True

    def begin(self) -> None:
        """Begin an iteration; operations since the end of the last iteration belong to no iteration."""
        self.marked = True
        self._marks()
        self._bury()
        self._is_partial = False
        self.iterations.begin()

    def step(self) -> None:
        """End an iteration; the next iteration may begin."""
        self._marks()
        self._end_iteration()

    def _end_iteration(self) -> None:
        self._bury()
        self.escapes.step()
        self._blank = {key: held for key, held in self._blank.items() if held() is not None}
        most, self._most = self._most, 0
        if self._is_unseen():
            self.counts.ended()
            self.iterations.unseen()
        else:
            self.iterations.limit_bytes = self.limit_bytes - self._beside()
            partial, self._is_partial = self._is_partial, False
            if partial:
                self.counts.ended()
                self.iterations.resume()
            else:
                self.iterations.end()
            self._governor.limit_bytes = self.iterations.kept_bytes  # may exceed the limit, for the plan
            if self._arrival is not None:
                self._arrival.look()
            if self.bypass is not None and not partial:
                self.bypass.look(most)
        if self._room is not None:
            self._room.tell()

    def _is_unseen(self) -> bool:
        """Return whether operations skip this mode at present."""
        return self.bypass is not None and self.bypass.is_open

    def _beside(self) -> int:
        """Return the bytes that the pool holds or serves (to threads, libraries) for no known storage."""
        if self._client is None or self._room is None:
            return 0
        if not self._room.holds_arena:
            return self._room.beside_bytes
        served = int(self._client.stats()["live"]["current"])
        return max(served - (self.storages.here_bytes - self.storages.outside_bytes), 0)

    def bring_all(self) -> None:
        """Reload every storage."""
        self.mover.bring_all()

    def values(self) -> dict[str, Any]:
        """Return the report entries as a dict for JSON, with sizes in bytes."""
        beyond = {} if self._room is None else self._room.values()
        values = said(self.counts, self.iterations.plan)
        if self.bypass is not None:
            values["bypassed"] += self.bypass.passed
        return {"limit_bytes": self.limit_bytes, **values, **beyond}

    # --- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or _NONE
        if self._ended:  # another thread ended the swapping
            return func(*args, **kwargs)
        if types and (passes := self.passes(types)) is not None:
            return NotImplemented if passes else func(*args, **kwargs)
        kind = self._kinds.get(id(func)) or self.kind(func)
        if kind.asks:
            return kind.call(*args, **kwargs)
        if self.bypass is not None and self.bypass.is_open:
            return self._pass_by(self.bypass, kind, args, kwargs)
        if kind.views:
            self._view(args)
            return kind.call(*args, **kwargs)
        result = self._run(kind, args, kwargs)
        if self._repeats is not None:
            self._repeat(self._repeats)
        return result

    def passes(self, types: Any) -> bool | None:
        """Classify the tensor classes among an operation's arguments.

        Returns:
            True if a class wraps other tensors, which are dispatched later; False for fake tensors, which
            have no memory; None if neither is among them.
        """
        for kind in types:
            if kind is FakeTensor:
                return False
            wraps = self._wrappers.get(kind)
            if wraps is None:
                wraps = self._wrappers[kind] = is_wrapper(kind)
            if wraps:
                return True
        return None

    def kind(self, func: Any) -> Kind:
        """Return the cached traits of an operation."""
        kind = self._kinds.get(id(func))
        if kind is None:
            if not self._told_of_compiler and is_compiled():
                self._told_of_compiler = True
                log.warning(
                    "torch.compile compiles nothing under a dispatch mode, which swapping is: "
                    "what was to be compiled runs as it is written"
                )
            kind = self._kinds[id(func)] = Kind(func, self.storages.device)  # the Kind keeps func alive
        return kind

    def _view(self, args: Any) -> None:
        """Reload the storages of a view's base: PyTorch checks that the view lies within the storage."""
        for arg in args:
            if isinstance(arg, torch.Tensor):
                storages: Any = [storage for _, storage in storages_in(arg)]
            elif isinstance(arg, torch.UntypedStorage):  # argument of `set_`
                storages = (arg,)
            else:
                continue
            for storage in storages:
                held = self._known.get(id(storage))
                if held is not None and held() is storage:
                    held.last = self._clock
                    if held.state in (AWAY, COMING):
                        self._bring(0, [held])
                    self.iterations.viewed(held)

    def _run(self, kind: Kind, args: Any, kwargs: Any) -> Any:  # noqa: C901
        """Run an operation with all argument storages on the device, and record the operation.

        Hot path when nothing has to move: operations identical to the previous iteration are handled inline;
        everything else is delegated.
        """
        storages, iterations, func = self.storages, self.iterations, kind.function
        if storages.dead:
            self._bury()
        given, written = self._given(kind, args, kwargs)
        if self._blank:
            self._unblank(given)
        if self._arrival is not None and self._arrival.due:
            self._arrival.take({held.key for held in given}, self._clock)
        at = len(iterations.tape.functions)
        if iterations.following:
            lines = iterations.lines
            if at >= len(lines) or lines[at].function is not func or lines[at].before:
                iterations.line(func, given)
        clock = self._clock = self._clock + 1
        size, here = 0, True
        for held in given:
            held.last = clock
            size += held.room
            if held.state != HERE:
                here = False
        needs, need = iterations.needs, None
        asked: Any = (args, kwargs) if kind.plain else size
        if at < len(needs):
            known = needs[at]
            if known[0] is func and known[1] == asked != 0:
                need = known[2]
        if need is None:
            need = self._needs.of(func, args, kwargs, size, self._governor.spare)
            if self._room is not None and at < len(needs) and needs[at][0] is func:
                self._room.differs(need.made - needs[at][2].made)
            iterations.needed(func, asked, need)
        more, room = need.made + need.room, self._room
        most = storages.here_bytes + more
        if most > self._most:
            self._most = most
        if not here or most > self._governor.limit_bytes or (room is not None and more and room.lacks(more)):
            self._bring(more, given)
        for held in written:  # even if the operation fails half-way
            held.clean = False
        iterations.begins()
        result, made = self._perform(kind, args, kwargs, given, need, size)
        if storages.here_bytes > self.counts.peak_bytes:
            self.counts.peak_bytes = storages.here_bytes
        if need.room:
            iterations.tape.rooms[at] = need.room
        iterations.ran(func, given, written, made)
        return result

    def _perform(
        self, kind: Kind, args: Any, kwargs: Any, given: list[Held], need: Need, size: int
    ) -> tuple[Any, list[Held]]:
        """Run an operation for which there is room; return its result and the new storages of the result."""
        func, sampled = kind.function, need.samples < SAMPLES
        if sampled:
            self._needs.begin()
        odd = kind.odd
        call = kind.call if odd is None else functools.partial(self._call, func, odd)
        try:
            result = call(*args, **kwargs)
        except torch.OutOfMemoryError:
            if not self._can_again(kind, given):
                raise
            result = call(*args, **kwargs)
        made = self._made(result)
        new = 0
        for held in made:
            new += held.room
        if sampled or new > need.made:
            self._needs.end(func, need, size, new)
        if odd is not None:
            self._stays(odd, given, made)
        return result, made

    def _pass_by(self, bypass: Bypass, kind: Kind, args: Any, kwargs: Any) -> Any:
        """Run an operation that reached this mode while the bypass is open.

        If room suffices, the bypass learns the operation, so that the next operation like this one may skip
        the mode; otherwise the bypass is closed.
        """
        if kind.views:
            bypass.learn(kind, 0)
            return kind.call(*args, **kwargs)
        if self.engine.streams:
            self.engine.note_stream()
        if self.storages.dead:
            self._bury()
            self.iterations.unseen()
        given, _ = self._given(kind, args, kwargs)
        if self._blank:
            self._unblank(given)
        size = sum(held.room for held in given)
        need = self._needs.of(kind.function, args, kwargs, size, self._governor.spare)
        if bypass.lacks(need.made + need.room):
            self.see_all()
            return self._run(kind, args, kwargs)
        result, _ = self._perform(kind, args, kwargs, given, need, size)
        bypass.learn(kind, need.made + need.room)
        return result

    def see_all(self) -> None:
        """Close the bypass, and register the storages that unseen operations used."""
        if self.bypass is None:
            return
        self._is_partial = True
        for tensor in self.bypass.close():
            self._clock += 1
            for plain, storage in storages_in(tensor):
                if (held := self._know(plain, storage)) is not None:
                    held.last = self._clock
                    self._unblank([held])
                    if held.state == HERE and bytes_of(storage) != held.size:
                        self.storages.resized(held, bytes_of(storage))
        if self._arrival is not None:
            self._arrival.look()

    def _repeat(self, repeats: Repeats) -> None:
        """Detect the ends of iterations in a program that marks none."""
        if repeats.ends(self.iterations.tape):
            before = self.counts.diverged
            self._end_iteration()
            repeats.was(odd=self.counts.diverged > before)
        elif repeats.begins(self.iterations.tape):
            self.iterations.begin()

    def _marks(self) -> None:
        """Switch to marked iterations: stop the period detection, and forget the detected iterations."""
        if self._repeats is not None:
            self._repeats = None
            self.iterations.forget()
            self._governor.limit_bytes = self.limit_bytes

    def _call(self, func: Any, odd: Odd, *args: Any, **kwargs: Any) -> Any:
        """Run an operation that may use tensors beyond the arguments.

        While this mode handles an operation, none of our modes sees nested operations. So for an operation
        that takes functions all storages are reloaded first, and a kernel in Python runs under mode `Beside`.
        """
        if odd.functions:
            self.bring_all()
        elif odd.keys is not None:
            return inside(self, func.redispatch, odd.keys, *args, **kwargs)
        return func(*args, **kwargs)

    def _stays(self, odd: Odd, given: list[Held], made: list[Held]) -> None:
        if odd.keeps:
            for held in (*given, *made):
                self.mover.keep(held)
        if odd.blank:  # C++ functions write into the new storage next, past the dispatcher
            for held in made:
                held.pins += 1
                self._blank[held.key] = held

    def _unblank(self, given: list[Held]) -> None:
        for held in given:
            if self._blank.get(held.key) is held:
                del self._blank[held.key]
                held.pins -= 1

    def _bring(self, need: int, given: list[Held]) -> None:
        """Reload the arguments of an operation, and make room for the results."""
        if self.storages.dead:
            self._bury()
        keys = {held.key: held for held in given}
        absent = [held for held in keys.values() if held.state != HERE]
        need += sum(held.room for held in absent if held.state == AWAY)
        if need > self._governor.spare:
            self._governor.make_room(need, keys, self._clock, ahead=not self.iterations.following)
        if absent:
            self._bring_each(absent, keys)

    def _bring_each(self, absent: list[Held], given: Container[int]) -> None:
        try:
            self.mover.bring_each(absent)
        except torch.OutOfMemoryError:
            if not self._governor.clear(given, self._clock):
                raise
            self.mover.bring_each(absent)

    def _can_again(self, kind: Kind, given: list[Held]) -> bool:
        """Return whether an operation that ran out of memory may be retried, after evicting other storages.

        An operation that writes is not retried, since memory may be written already, or an output may have a
        new shape but no memory; nor is an operation that draws random numbers, since they may be drawn
        already.
        """
        if kind.writes or torch.Tag.nondeterministic_seeded in getattr(kind.function, "tags", ()):
            return False
        if self._is_unseen():
            self.see_all()
        return self._governor.clear({held.key for held in given}, self._clock)

    def _given(self, kind: Kind, args: Any, kwargs: Any) -> tuple[list[Held], list[Held]]:
        """Return the storages among the arguments, duplicates included, and the written ones among them."""
        given: list[Held] = []
        written: list[Held] = []
        if kind.whole:
            self._look((args, kwargs), given, written)
            return given, written
        known, count = self._known, len(args)
        for at, name, writes in kind.arguments:
            value = args[at] if at < count else kwargs.get(name)
            if value is None:
                continue
            if type(value) in PLAIN:  # fast path for most tensors
                try:
                    held = known.get(id(storage := storage_of(value)))
                except (NotImplementedError, RuntimeError):  # a sparse tensor
                    held = None
                if (
                    held is not None
                    and held() is storage
                    and (held.state == AWAY or bytes_of(storage) == held.size)
                ):
                    given.append(held)
                    if writes:
                        written.append(held)
                    continue
            self._look(value, given, written if writes else None)
        return given, written

    def _look(self, value: Any, given: list[Held], written: list[Held] | None) -> None:
        known = self._known
        for plain, storage in storages_in(value):
            held = known.get(id(storage))
            if held is None or held() is not storage:
                held = self._know(plain, storage)
                if held is None:
                    continue
            if held.state != AWAY and bytes_of(storage) != held.size:
                self.storages.resized(held, bytes_of(storage))
            given.append(held)
            if written is not None:
                written.append(held)

    def _know(self, tensor: torch.Tensor, storage: Any) -> Held | None:
        """Return the record of a storage; register an unknown storage first."""
        held = self._known.get(id(storage))
        if held is None or held() is not storage:
            held = self.storages.meet(tensor, storage, None, self._clock)
            if held is not None:
                self.iterations.met(held)
        return held

    def _made(self, result: Any) -> list[Held]:
        """Register and return the new storages among an operation's results."""
        made: list[Held] = []
        known, meet, at = self._known, self.storages.meet, len(self.iterations.tape.functions)
        for plain, storage in storages_in(result):
            held = known.get(id(storage))
            if held is None or held() is not storage:
                held = meet(plain, storage, (at, len(made)), self._clock)
                if held is not None:
                    made.append(held)
        return made

    def _bury(self) -> None:
        """Remove dead storages and their host copies; twice for one storage if Ctrl-C comes meanwhile."""
        for held in self.storages.buried():
            if held.copy is not None:
                self.engine.drop(held.copy)
                held.copy = None
            self.iterations.gone(held)
