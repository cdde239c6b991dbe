"""A dispatch mode that offloads storages to the host and reloads them, to hold a device memory limit."""

from __future__ import annotations

import functools
import importlib
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mempool.logs import log
from mempool.recording.torch.ledger import storages_in
from mempool.torch.eager import interposer
from mempool.torch.eager.arena_admission import ArenaAdmission
from mempool.torch.eager.bypass import Bypass
from mempool.torch.eager.dispatcher_patches import DispatcherPatches
from mempool.torch.eager.eviction_policy import EvictionPolicy
from mempool.torch.eager.forks import forking
from mempool.torch.eager.graph_captures import GraphCaptures
from mempool.torch.eager.iterations import Iterations
from mempool.torch.eager.op_footprints import Footprint, OpFootprints, PoolCounters
from mempool.torch.eager.operator_traits import NATIVE, PLAIN, OperatorTraits, TraitsRegistry, wraps_memory
from mempool.torch.eager.pool_headroom import PoolHeadroom
from mempool.torch.eager.recorded_iteration import IterationDetector
from mempool.torch.eager.schedule_follower import ScheduleFollower
from mempool.torch.eager.storages import (
    OFFLOADED,
    RELOADING,
    RESIDENT,
    StorageRecord,
    StorageRegistry,
    bytes_of,
    storage_of,
)
from mempool.torch.eager.transfers import OffloadCounters, TransferManager, report_values
from mempool.torch.offload.options import OPTIONS
from mempool.torch.optimizer_steps import Listener

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool import _core
    from mempool.torch.eager.operator_traits import UndeclaredEffects
    from mempool.torch.eager.relative_limit import RelativeLimit
    from mempool.torch.offload.engine import Engine

#: A limit in bytes that nothing reaches, until a relative limit is decided.
UNDECIDED = 1 << 62
_NO_KWARGS: dict[str, Any] = {}
_FAKE = torch._C._TorchDispatchModeKey.FAKE


class OffloadMode(TorchDispatchMode):
    """Dispatch mode that keeps the memory of one device's storages within a limit.

    Before each operation, the mode reloads all storages among the arguments, whatever a schedule says, so no
    result ever depends on one. Storages give up device memory only at that moment: C++ code may use the
    storages that an operation made until the next operation begins. An iteration like the recorded one
    follows a schedule, which moves storages ahead of time; in other iterations, the least recently used
    storages are evicted when room is needed.

    Attributes:
        limit_bytes: limit of the storages' device memory, bytes.
        counts: counters of transfers, evictions and waits.
        marked: whether the program itself marks the ends of iterations, instead of the first optimizer's
            steps.
        storages: registry of the known storages.
        iterations: the recurring iterations of the program, and their schedules.
        transfers: offloads and reloads storages.
        eviction: evicts storages where no schedule makes room.
        headroom: headroom of the pool; None without a pool.
        traits: traits of the operations.
        unwritten: storages, by key, that an operation made and nothing has written yet.
        follower: follows schedules without the mode; None: the mode sees every operation.
        bypass: lets operations skip the mode while nothing has to move; None: the mode sees every operation.
        clock: number of the operation, counted over all iterations.
        relative_limit: decides the limit when the first iteration ends; None: the limit is decided.
        patches: patches that reload storages for PyTorch code that accesses memory past the dispatcher.
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
        on_iteration_end: Callable[[], None] = lambda: None,
        reset_plans: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the mode; the mode is active inside its ``with`` block.

        Args:
            engine: copies between device and host.
            device: device whose storages are offloaded.
            limit_bytes: most bytes of device memory for the storages.
            alignment: sizes are rounded up to a multiple of this, bytes.
            host_bytes: most bytes of host memory that schedules use; None: no limit.
            client: client of the pool that serves the device. Workspaces of running operations are measured
                and count; memory that the pool serves to unknown storages is subtracted from the limit.
            on_iteration_end: called when an optimizer's step ends an iteration.
            reset_plans: makes the pool forget its plans.
        """
        super().__init__()
        self.engine = engine
        self.counts = OffloadCounters()
        self.limit_bytes = limit_bytes
        self.storages = StorageRegistry(
            device, alignment, None if client is None else client.pool.owns, engine.current_stream
        )
        self._client = client
        self._on_iteration_end = on_iteration_end
        self.transfers = TransferManager(engine, self.storages, self.counts)
        self.headroom = None if client is None else PoolHeadroom(client, self.storages, limit_bytes)
        self.iterations = Iterations(
            engine, self.storages, self.transfers, self.counts, limit_bytes, host_bytes, client, self.headroom
        )
        self.eviction = EvictionPolicy(
            self.storages, self.transfers, self.counts, limit_bytes, self.iterations.next_use, self.headroom
        )
        self._admission: ArenaAdmission | None = None
        self.bypass: Bypass | None = None
        if client is not None and self.headroom is not None:  # both are None, or neither
            self._admission = ArenaAdmission(
                client,
                self.headroom,
                self.storages,
                self.iterations,
                self.eviction,
                self.transfers,
                reset_plans,
            )
            self.bypass = Bypass(
                self,
                client,
                self.headroom,
                self.storages,
                self.iterations,
                self.transfers,
                self._admission,
                self.counts,
            )
            self.iterations.follower = ScheduleFollower(
                self, client, self.headroom, self.iterations, self._admission
            )
        self.follower = self.iterations.follower
        self._records = self.storages.records
        self.traits = TraitsRegistry(device.type)
        self._traits = self.traits.by_id
        self.footprints = OpFootprints(None if client is None else PoolCounters(client), alignment)
        self.clock = 0
        self._optimizer: Any = None
        self._listener: Listener | None = None
        self._ended = False
        self._detector: IterationDetector | None = IterationDetector()
        self.marked = False
        self._has_warned_of_thread = False
        self.unwritten: dict[int, StorageRecord] = {}
        self._peak_bytes = 0  # high-water mark of this iteration's bytes, workspaces included
        self._is_partial = False  # the beginning of this iteration was not seen
        self.relative_limit: RelativeLimit | None = None
        self.patches = DispatcherPatches(self.storages, self.transfers, self.record_of, self.known_record)
        self._set_ours = interposer.library().mempool_interposer_ours
        self._keeps: dict[str, bool] = {}  # see `_keeps_arguments`, by operation
        self._captures = (
            GraphCaptures(self.begin_capture, self.end_capture, engine.note_stream)
            if engine.streams
            else None
        )

    # --- iterations

    def __enter__(self) -> Self:
        # PyTorch does so at the first operation, where Ctrl-C would break the import.
        importlib.import_module("torch._dynamo")

        interposer.install(self)
        self._ended = False
        self._listener = Listener(before=self._before_optimizer_step, after=self._after_optimizer_step)
        self.transfers.thread = threading.get_ident()
        interposer.begin_entries(self)
        self.patches.install()
        forking.add(self)
        if self._captures is not None:
            self._captures.install()
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self.end()

    def end(self) -> None:
        """Reload every storage, and stop handling operations."""
        self._ended = True
        if self.follower is not None:
            self.follower.stop()
        if self.bypass is not None:
            self.bypass.end()
        if self._listener is not None:
            self._listener.remove()
        if self.relative_limit is not None:
            self.relative_limit.end()
        if self.headroom is not None:
            self.headroom.end()  # what comes back now is not within the limit
        self.transfers.reload_all()
        self.iterations.close()
        forking.discard(self)
        self.patches.remove()
        interposer.remove(self)
        if self._captures is not None:
            self._captures.remove()

    def stop(self) -> None:
        """Stop all evictions; offloaded storages are reloaded on demand."""
        if self.bypass is not None:
            self.bypass.abandon()
            self.bypass.is_available = False
        if self.follower is not None:
            self.follower.stop()
        self.limit_bytes = self.eviction.limit_bytes = self.iterations.limit_bytes = UNDECIDED
        if self.headroom is not None:
            self.headroom.end()
        self.iterations.forget()

    def begin_capture(self) -> None:
        """Begin the capture of a graph: nothing leaves until `end_capture`, and no operation is bypassed.

        Storages that other threads use stay on the device anyway.
        """
        if threading.get_ident() == self.transfers.thread:
            self.close_bypass()
            self.iterations.suspend()
            self._is_partial = True
            interposer.begin_entries(self)  # so that each storage is met, and stays, before its entries
        with self.transfers.lock:
            self.transfers.wait_all()
            self.engine.begin_capture()
            self.transfers.captures += 1

    def end_capture(self) -> None:
        """End the capture of a graph."""
        with self.transfers.lock:
            self.transfers.captures -= 1
            self.engine.end_capture()

    def _before_optimizer_step(self, _: torch.optim.Optimizer) -> None:
        """Stop the period detection before an optimizer steps: training's repetitions are no iterations."""
        if threading.get_ident() == self.transfers.thread:
            self._stop_detection()

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if threading.get_ident() != self.transfers.thread:
            self._warn_of_thread()
        if self.marked or threading.get_ident() != self.transfers.thread:
            return
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            self.step()
            self._on_iteration_end()

    def _warn_of_thread(self) -> None:
        if not self._has_warned_of_thread:
            log.warning(
                "an optimizer steps in %s, not in the thread that set the limit: what is trained there is "
                "not swapped; install the pool in the thread that trains",
                threading.current_thread().name,
            )
        self._has_warned_of_thread = True

    def begin(self) -> None:
        """Begin an iteration; operations since the end of the last iteration belong to no iteration."""
        self.marked = True
        self._stop_detection()
        self.remove_dead()
        if self.follower is not None:
            self.follower.take_over()
        self._is_partial = False
        begins = len(self.iterations.current) > 0
        self.iterations.begin()
        if begins and self._admission is not None:
            self._admission.begin_iteration()
        interposer.begin_entries(self)
        if self.follower is not None:
            self.follower.begin_iteration()

    def step(self) -> None:
        """End an iteration; the next iteration may begin."""
        self._stop_detection()
        self._end_iteration()

    def decide_limit(self, limit_bytes: int) -> None:
        """Replace the undecided limit between two iterations."""
        self.relative_limit = None
        self.limit_bytes = self.eviction.limit_bytes = limit_bytes
        self.iterations.set_limit(limit_bytes)
        if self.headroom is not None:
            self.admit(0, [])
            self.headroom.request(limit_bytes)

    def _end_iteration(self) -> None:
        self.remove_dead()
        self._record_entries()
        interposer.begin_entries(self)
        if self.relative_limit is not None:
            self.relative_limit.end_iteration()
        self.patches.end_iteration()
        self.unwritten = {key: record for key, record in self.unwritten.items() if record() is not None}
        peak_bytes, self._peak_bytes = self._peak_bytes, 0
        if self.follower is not None:
            peak_bytes = self.follower.end_iteration(peak_bytes)
        if self._is_bypassed():
            self.counts.end_iteration()
            self.engine.end_iteration()
            self.iterations.suspend()
        else:
            self.iterations.limit_bytes = self.limit_bytes - self._foreign_bytes()
            partial, self._is_partial = self._is_partial, False
            is_followed = not partial and self.iterations.is_followed and self.iterations.is_final
            followed = self.iterations.pattern if is_followed else None
            if partial:
                self.counts.end_iteration()
                self.iterations.resume()
            else:
                self.iterations.end()
            self.eviction.limit_bytes = self.iterations.resident_limit_bytes
            if self._admission is not None:
                self._admission.update(followed)
            if self.bypass is not None and not partial:
                self.bypass.record_peak(peak_bytes)
            if self.follower is not None and self._detector is None:
                self.follower.begin_iteration()
        if self.headroom is not None:
            self.headroom.warn_of_excess()

    def _is_bypassed(self) -> bool:
        """Return whether operations skip this mode at present."""
        return self.bypass is not None and self.bypass.is_open

    def _foreign_bytes(self) -> int:
        """Return the bytes that the pool holds or serves (to threads, libraries) for no known storage."""
        if self._client is None or self.headroom is None:
            return 0
        if not self.headroom.holds_arena:
            return self.headroom.foreign_bytes
        served = int(self._client.stats()["live"]["current"])
        return max(served - (self.storages.resident_bytes - self.storages.foreign_bytes), 0)

    def values(self) -> dict[str, Any]:
        """Return the report entries as a dict for JSON, with sizes in bytes."""
        beyond = {} if self.headroom is None else self.headroom.values()
        values = report_values(self.counts, self.iterations.schedule)
        if self.bypass is not None:
            values["bypassed"] += self.bypass.passed
        if self.follower is not None:
            values["followed"] = self.follower.passed
        limit_bytes = None if self.limit_bytes == UNDECIDED else self.limit_bytes
        return {"limit_bytes": limit_bytes, **values, **beyond}

    # --- operations that this mode does not see

    def _record_entries(self) -> None:
        """Record the accesses of loops over single entries as accesses by the previous operation."""
        for tensor, written in interposer.accessed_by_entries():
            if (record := self.storages.find(tensor.untyped_storage())) is not None:
                record.last = self.clock
                self.iterations.record_view(record, written=written)

    def reload(self, absent: list[torch.Tensor]) -> None:
        """Make the bytes of these tensors accessible for an operation of a loop over single entries.

        A CPU reads and writes the host copy, which is the only one unless the storage is on the way back.
        """
        records = [record for one in absent if (record := self.storages.find(one.untyped_storage()))]
        if self.storages.device != "cpu":
            self.admit(0, records)
            return
        for record in records:
            if record.state == RELOADING:
                self.transfers.wait(record)

    def lend(
        self,
        tensor: torch.Tensor,
        operation: str,
        writes: bool,  # noqa: FBT001
        given: list[tuple[Any, StorageRecord, bool, bool]],
    ) -> None:
        """Reload and pin the storages of an argument, and add entries to `given` for `interposer`."""
        self.counts.beside += 1
        other = threading.get_ident() != self.transfers.thread
        for plain, storage in storages_in(tensor):
            if (record := self.known_record(plain, storage)) is None:
                continue
            given.append((self, record, False, writes))
            given[-1] = self, record, self.transfers.lend(record), writes
            if (other and self.storages.device != "cpu") or self._keeps_arguments(operation):
                self.transfers.hold_resident(record)  # another thread may use another stream

    def _keeps_arguments(self, operation: str) -> bool:
        """Return whether arguments are used after the operation, such as ``aten::add.Tensor``."""
        if (keeps := self._keeps.get(operation)) is None:
            space, _, name = operation.partition("::")
            name, _, overload = name.partition(".")
            function = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
            effects = self.traits.of(function).effects
            keeps = self._keeps[operation] = effects is not None and effects.keeps
        return keeps

    # --- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or _NO_KWARGS
        if self._ended:  # another thread ended the offloading
            return func(*args, **kwargs)
        if self._is_foreign_thread():
            return func(*args, **kwargs)
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            return func(*args, **kwargs)  # the result has no memory, and a size may be a symbol of a trace
        self._set_ours(1)
        try:
            return self._dispatch(func, types, args, kwargs)
        finally:
            self._set_ours(0)

    def _is_foreign_thread(self) -> bool:
        """Return whether this is one of PyTorch's threads that took over the program's modes.

        A GPU's backward pass runs in a thread of autograd's engine while the program's thread waits.
        """
        return threading.get_ident() != self.transfers.thread and (
            self.storages.device == "cpu" or torch._C._current_graph_task_id() == -1
        )

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if types and (is_wrapper := self.traits.skips(types)) is not None:
            if is_wrapper:
                return NotImplemented
            if wraps_memory(args, kwargs):  # the mode of the trace runs operations on them, unseen
                self.transfers.reload_all()
            return func(*args, **kwargs)
        traits = self._traits.get(id(func)) or self.traits.of(func)
        if traits.asks:
            if traits.may_pass:
                interposer.learn_view(func)
            return traits.call(*args, **kwargs)
        if self.bypass is not None and self.bypass.is_open:
            return self._run_bypassed(self.bypass, traits, args, kwargs)
        if traits.views:
            self._view(args)
            if traits.may_pass:
                interposer.learn_view(func)
            return traits.call(*args, **kwargs)
        result = self._run_operation(traits, args, kwargs)
        if self._detector is not None:
            self._detect_iteration(self._detector)
        return result

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
                record = self._records.get(id(storage))
                if record is not None and record() is storage:
                    record.last = self.clock
                    if record.state in (OFFLOADED, RELOADING):
                        self.admit(0, [record])
                    self.iterations.record_view(record)

    def _run_operation(self, traits: OperatorTraits, args: Any, kwargs: Any) -> Any:  # noqa: C901
        """Run an operation with all argument storages on the device, and record the operation.

        Hot path when nothing has to move: operations identical to the previous iteration are handled inline;
        everything else is delegated.
        """
        storages, iterations, func = self.storages, self.iterations, traits.function
        if storages.dead:
            self.remove_dead()
        if (follower := self.follower) is not None:
            follower.synchronize()
        self._record_entries()
        given, written = self._argument_records(traits, args, kwargs)
        unwritten = len(self.unwritten)
        if unwritten:
            self._mark_written(given)
        if self._admission is not None and self._admission.due:
            self._admission.install(self.clock)
        at = len(iterations.current.functions)
        if iterations.is_following:
            actions = iterations.actions
            if at >= len(actions) or actions[at].function is not func or actions[at].before:
                iterations.start_operation(func, given)
        clock = self.clock = self.clock + 1
        size, all_resident = 0, True
        for record in given:
            record.last = clock
            size += record.rounded_bytes
            if record.state != RESIDENT:
                all_resident = False
        footprints, footprint = iterations.footprints, None
        key: Any = (args, kwargs) if traits.plain else size
        if at < len(footprints):
            previous = footprints[at]
            if previous[0] is func and previous[1] == key != 0:
                footprint = previous[2]
        if footprint is None:
            footprint = self.footprints.footprint(func, args, kwargs, size, self.eviction.spare)
            if self.headroom is not None and at < len(footprints) and footprints[at][0] is func:
                self.headroom.note_growth(footprint.result_bytes - footprints[at][2].result_bytes)
            iterations.remember_footprint(func, key, footprint)
        needed, headroom = footprint.result_bytes + footprint.workspace_bytes, self.headroom
        peak = storages.resident_bytes + needed
        if peak > self._peak_bytes:
            self._peak_bytes = peak
        if (
            not all_resident
            or peak > self.eviction.limit_bytes
            or (headroom is not None and needed and headroom.lacks(needed))
        ):
            self.admit(needed, given)
        for record in written:  # even if the operation fails half-way
            record.has_valid_copy = False
        iterations.mark_start(footprint)
        result, made = self._perform(traits, args, kwargs, given, footprint, size)
        if storages.resident_bytes > self.counts.peak_bytes:
            self.counts.peak_bytes = storages.resident_bytes
        if footprint.workspace_bytes:
            iterations.current.workspaces[at] = footprint.workspace_bytes
        if self.transfers.captures and self.engine.is_capturing():
            for record in (*given, *made):
                record.movable = False
        iterations.end_operation(func, given, written, made)
        if follower is not None:
            follower.learn(traits, at, footprint, passes=len(self.unwritten) == unwritten)
            follower.advance()
        if needed <= OPTIONS.min_storage_bytes and traits.may_be_followed:
            interposer.learn_entry(func)
        return result

    def _perform(
        self,
        traits: OperatorTraits,
        args: Any,
        kwargs: Any,
        given: list[StorageRecord],
        footprint: Footprint,
        size: int,
    ) -> tuple[Any, list[StorageRecord]]:
        """Run an operation for which there is room; return its result and the new storages of the result."""
        func, sampled = traits.function, footprint.samples < OPTIONS.footprint_samples
        if sampled:
            self.footprints.begin()
        effects = traits.effects
        call = traits.call if effects is None else functools.partial(self._call_with_effects, func, effects)
        try:
            result = call(*args, **kwargs)
        except torch.OutOfMemoryError:
            if not self._can_retry(traits, given):
                raise
            result = call(*args, **kwargs)
        made = self._register_results(result)
        new = 0
        for record in made:
            new += record.rounded_bytes
        if sampled or new > footprint.result_bytes:
            self.footprints.end(func, footprint, size, new)
        if effects is not None:
            self._apply_effects(effects, given, made)
        return result, made

    def _run_bypassed(self, bypass: Bypass, traits: OperatorTraits, args: Any, kwargs: Any) -> Any:
        """Run an operation that reached this mode while the bypass is open.

        If room suffices, the bypass learns the operation, so that the next operation like this one may skip
        the mode; otherwise the bypass is closed.
        """
        if traits.views:
            bypass.learn(traits, 0)
            return traits.call(*args, **kwargs)
        if self.engine.streams:
            self.engine.note_stream()
        if self.storages.dead:
            self.remove_dead()
            self.iterations.suspend()
        given, _ = self._argument_records(traits, args, kwargs)
        if self.unwritten:
            self._mark_written(given)
        size = sum(record.rounded_bytes for record in given)
        footprint = self.footprints.footprint(traits.function, args, kwargs, size, self.eviction.spare)
        if bypass.lacks(footprint.result_bytes + footprint.workspace_bytes):
            self.close_bypass()
            return self._run_operation(traits, args, kwargs)
        result, _ = self._perform(traits, args, kwargs, given, footprint, size)
        bypass.learn(traits, footprint.result_bytes + footprint.workspace_bytes)
        return result

    def close_bypass(self) -> None:
        """Close the bypass, and register the storages that unseen operations used."""
        if self.bypass is None:
            return
        self._is_partial = True
        for tensor in self.bypass.close():
            self.clock += 1
            for plain, storage in storages_in(tensor):
                if (record := self.record_of(plain, storage)) is not None:
                    record.last = self.clock
                    self._mark_written([record])
                    if record.state == RESIDENT and bytes_of(storage) != record.size:
                        self.storages.resize_record(record, bytes_of(storage))
        if self._admission is not None:
            self._admission.update(None)

    def _detect_iteration(self, detector: IterationDetector) -> None:
        """Detect the ends of iterations in a program that marks none."""
        if detector.ends(self.iterations.current):
            before = self.counts.diverged
            self._end_iteration()
            detector.record_end(diverged=self.counts.diverged > before)
        elif detector.begins(self.iterations.current):
            self.iterations.begin()
            interposer.begin_entries(self)

    def _stop_detection(self) -> None:
        """Switch to marked iterations: stop the period detection, and forget the detected iterations."""
        if self._detector is not None:
            self._detector = None
            self.iterations.forget()
            self.eviction.limit_bytes = self.limit_bytes

    def _call_with_effects(self, func: Any, effects: UndeclaredEffects, *args: Any, **kwargs: Any) -> Any:
        """Run an operation that may use tensors beyond the arguments.

        This mode sees no operation nested in the one that it handles. So all storages are reloaded before an
        operation that takes functions, and operations of a kernel in Python count as the program's.
        """
        if effects.functions:
            self.transfers.reload_all()
        elif effects.keys is not None:
            self._set_ours(0)
        return func(*args, **kwargs)

    def _apply_effects(
        self, effects: UndeclaredEffects, given: list[StorageRecord], made: list[StorageRecord]
    ) -> None:
        if effects.keeps:
            for record in (*given, *made):
                self.transfers.hold_resident(record)
        if effects.blank:  # C++ functions write into the new storage next, past the dispatcher
            for record in made:
                record.pins += 1
                self.unwritten[record.key] = record

    def _mark_written(self, given: list[StorageRecord]) -> None:
        for record in given:
            if self.unwritten.get(record.key) is record:
                del self.unwritten[record.key]
                record.pins -= 1

    def admit(self, needed: int, given: list[StorageRecord]) -> None:
        """Reload the arguments of an operation, and make room for `needed` bytes of results."""
        if self.storages.dead:
            self.remove_dead()
        if self.follower is not None and self.follower.is_following:
            self.follower.register_made()  # they may be evicted too
        self.eviction.admit(needed, given, self.clock, ahead=not self.iterations.is_following)

    def _can_retry(self, traits: OperatorTraits, given: list[StorageRecord]) -> bool:
        """Return whether an operation that ran out of memory may be retried, after evicting other storages.

        An operation that writes is not retried, since memory may be written already, or an output may have a
        new shape but no memory; nor is an operation that draws random numbers, since they may be drawn
        already; nor is an operation with kernels of the program, which may count or print.
        """
        if traits.function not in NATIVE:
            return False
        if traits.writes or torch.Tag.nondeterministic_seeded in getattr(traits.function, "tags", ()):
            return False
        if self._is_bypassed():
            self.close_bypass()
        return self.eviction.clear({record.key for record in given}, self.clock)

    def _argument_records(
        self, traits: OperatorTraits, args: Any, kwargs: Any
    ) -> tuple[list[StorageRecord], list[StorageRecord]]:
        """Return the storages among the arguments, duplicates included, and the written ones among them."""
        given: list[StorageRecord] = []
        written: list[StorageRecord] = []
        if traits.whole:
            self._collect_records((args, kwargs), given, written)
            return given, written
        records, count = self._records, len(args)
        for at, name, writes in traits.arguments:
            value = args[at] if at < count else kwargs.get(name)
            if value is None:
                continue
            if type(value) in PLAIN:  # fast path for most tensors
                try:
                    record = records.get(id(storage := storage_of(value)))
                except (NotImplementedError, RuntimeError):  # a sparse tensor
                    record = None
                if (
                    record is not None
                    and record() is storage
                    and (record.state == OFFLOADED or bytes_of(storage) == record.size)
                ):
                    given.append(record)
                    if writes:
                        written.append(record)
                    continue
            self._collect_records(value, given, written if writes else None)
        return given, written

    def _collect_records(
        self, value: Any, given: list[StorageRecord], written: list[StorageRecord] | None
    ) -> None:
        records = self._records
        for plain, storage in storages_in(value):
            record = records.get(id(storage))
            if record is None or record() is not storage:
                record = self.record_of(plain, storage)
                if record is None:
                    continue
            if record.state != OFFLOADED and bytes_of(storage) != record.size:
                self.storages.resize_record(record, bytes_of(storage))
            given.append(record)
            if written is not None:
                written.append(record)

    def known_record(self, tensor: torch.Tensor, storage: Any) -> StorageRecord | None:
        """Return the record of a storage that an operation used, seen here or not; None for others."""
        record = self.storages.find(storage)
        if record is None and self.follower is not None and self.follower.adopt(tensor, storage):
            record = self.storages.find(storage)
        return record

    def record_of(self, tensor: torch.Tensor, storage: Any) -> StorageRecord | None:
        """Return the record of a storage; register an unknown storage first."""
        if (record := self.known_record(tensor, storage)) is None:
            record = self.storages.register(tensor, storage, None, self.clock)
            if record is not None:
                if self.follower is not None:
                    self.follower.synchronize()
                self.iterations.record_argument(record)
        return record

    def _register_results(self, result: Any) -> list[StorageRecord]:
        """Register and return the new storages among an operation's results."""
        made: list[StorageRecord] = []
        records, register = self._records, self.storages.register
        at = len(self.iterations.current.functions)
        for plain, storage in storages_in(result):
            record = records.get(id(storage))
            if record is None or record() is not storage:
                record = register(plain, storage, (at, len(made)), self.clock)
                if record is not None:
                    made.append(record)
        return made

    def remove_dead(self) -> None:
        """Remove dead storages and their host copies; twice for one storage if Ctrl-C comes meanwhile."""
        for record in self.storages.take_dead():
            if record.copy is not None:
                self.engine.drop(record.copy)
                record.copy = None
            self.iterations.record_death(record)
