"""Runs operations that the mode sees: arguments on the device, room for results, and a record of each."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch

from mempool.recording.torch.ledger import storages_in
from mempool.torch.eager import interposer
from mempool.torch.eager.op_footprints import NO_FOOTPRINT
from mempool.torch.eager.operator_traits import NATIVE, PLAIN
from mempool.torch.eager.storages import OFFLOADED, RELOADING, RESIDENT, bytes_of, storage_of
from mempool.torch.offload.options import OPTIONS

if TYPE_CHECKING:
    from mempool.torch.eager.arena_admission import ArenaAdmission
    from mempool.torch.eager.bypass import Bypass
    from mempool.torch.eager.eviction_policy import EvictionPolicy
    from mempool.torch.eager.iterations import Iterations
    from mempool.torch.eager.op_footprints import Footprint, OpFootprints
    from mempool.torch.eager.operator_traits import OperatorTraits, UndeclaredEffects
    from mempool.torch.eager.pool_headroom import PoolHeadroom
    from mempool.torch.eager.schedule_follower import ScheduleFollower
    from mempool.torch.eager.storages import StorageRecord, StorageRegistry
    from mempool.torch.eager.transfers import OffloadCounters, TransferManager
    from mempool.torch.offload.engine import Engine


class OperationRunner:
    """Runs the operations that reach the mode.

    Attributes:
        footprints: memory that operations need.
        unwritten: storages, by key, that an operation made and nothing has written yet.
        clock: number of operations so far, in all iterations.
        is_partial: whether operations of this iteration were not seen.
        follower: follows schedules without the mode; None: the mode sees every operation.
        bypass: lets operations skip the mode while nothing has to move; None: the mode sees every operation.
        admission: installs the pool's arena; None without a pool.
    """

    def __init__(
        self,
        engine: Engine,
        storages: StorageRegistry,
        transfers: TransferManager,
        iterations: Iterations,
        eviction: EvictionPolicy,
        counts: OffloadCounters,
        footprints: OpFootprints,
        headroom: PoolHeadroom | None,
    ) -> None:
        """Run operations on storages of one device, within the headroom of a pool or without one."""
        self._engine, self._storages, self._transfers = engine, storages, transfers
        self._iterations, self._eviction, self._headroom = iterations, eviction, headroom
        self._records, self._counts = storages.records, counts
        self.footprints = footprints
        self.unwritten: dict[int, StorageRecord] = {}
        self.clock = 0
        self.is_partial = False
        self.follower: ScheduleFollower | None = None
        self.bypass: Bypass | None = None
        self.admission: ArenaAdmission | None = None
        self._peak_bytes = 0  # high-water mark of this iteration's bytes, workspaces included
        self._set_operation_kind = interposer.library().mempool_interposer_set_kind

    def take_peak(self) -> int:
        """Return the most bytes of storages and workspaces since the last call."""
        peak_bytes, self._peak_bytes = self._peak_bytes, 0
        return peak_bytes

    def forget_dead_unwritten(self) -> None:
        """Forget unwritten storages that have ended."""
        self.unwritten = {key: record for key, record in self.unwritten.items() if record() is not None}

    def view(self, args: Any) -> None:
        """Reload the storages of a view's base, since PyTorch compares the view with the storage's size."""
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
                    self._iterations.record_view(record)

    def run(self, traits: OperatorTraits, args: Any, kwargs: Any) -> Any:  # noqa: C901
        """Run an operation with all argument storages on the device, and record the operation.

        Hot path when nothing has to move: operations identical to the previous iteration are handled inline;
        everything else is delegated.
        """
        storages, iterations, func = self._storages, self._iterations, traits.function
        if storages.dead:
            self.remove_dead()
        if (follower := self.follower) is not None:
            follower.synchronize()
            self._transfers.end_native_moves()
        self.record_entries()
        given, written = self._argument_records(traits, args, kwargs)
        unwritten = len(self.unwritten)
        if unwritten:
            self._mark_written(given)
        if self.admission is not None and self.admission.due:
            self.admission.install(self.clock)
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
        previous = iterations.footprints[at] if at < len(iterations.footprints) else NO_FOOTPRINT
        if traits.is_foreach and previous[0] is func and previous[1] == size:  # long lists
            footprint = previous[2]
        else:
            footprint = self.footprints.footprint(func, args, kwargs, size)
        if previous[2] is not footprint:
            if self._headroom is not None and previous[0] is func:
                self._headroom.note_growth(footprint.result_bytes - previous[2].result_bytes)
            iterations.remember_footprint(func, size, footprint)
        needed, headroom = footprint.result_bytes + footprint.workspace_bytes, self._headroom
        peak = storages.resident_bytes + needed
        if peak > self._peak_bytes:
            self._peak_bytes = peak
        if (
            not all_resident
            or peak > self._eviction.limit_bytes
            or (headroom is not None and needed and headroom.lacks(needed))
        ):
            self.admit(needed, given)
        for record in written:  # even if the operation fails
            record.has_valid_copy = False
        iterations.mark_start(footprint)
        result, made = self._perform(traits, args, kwargs, given, footprint, size)
        if storages.resident_bytes > self._counts.peak_bytes:
            self._counts.peak_bytes = storages.resident_bytes
        if footprint.workspace_bytes:
            iterations.current.workspaces[at] = footprint.workspace_bytes
        if self._transfers.captures and self._engine.is_capturing():
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
        """Run an operation after room was made; return the result and the result's new storages."""
        func, sampled = traits.function, footprint.samples < OPTIONS.footprint_samples
        if sampled:
            self.footprints.begin()
        effects = traits.effects
        call = traits.repeat if effects is None else functools.partial(self._call_with_effects, func, effects)
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

    def run_bypassed(self, bypass: Bypass, traits: OperatorTraits, args: Any, kwargs: Any) -> Any:
        """Run an operation that reached this mode while the bypass is open.

        If room suffices, the bypass learns the operation: later operations with the same traits and footprint
        skip the mode. Otherwise the bypass is closed.
        """
        if traits.makes_views(args):
            bypass.learn(traits, 0)
            return traits.repeat(*args, **kwargs)
        if self._engine.streams:
            self._engine.note_stream()
        if self._storages.dead:
            self.remove_dead()
            self._iterations.suspend()
        given, _ = self._argument_records(traits, args, kwargs)
        if self.unwritten:
            self._mark_written(given)
        size = sum(record.rounded_bytes for record in given)
        footprint = self.footprints.footprint(traits.function, args, kwargs, size)
        if bypass.lacks(footprint.result_bytes + footprint.workspace_bytes):
            self.close_bypass()
            return self.run(traits, args, kwargs)
        result, _ = self._perform(traits, args, kwargs, given, footprint, size)
        bypass.learn(traits, footprint.result_bytes + footprint.workspace_bytes)
        return result

    def close_bypass(self) -> None:
        """Close the bypass, and register the storages that unseen operations used."""
        if self.bypass is None:
            return
        self.is_partial = True
        for tensor in self.bypass.close():
            self.clock += 1
            for plain, storage in storages_in(tensor):
                if (record := self.record_of(plain, storage)) is not None:
                    record.last = self.clock
                    self._mark_written([record])
                    if record.state == RESIDENT and bytes_of(storage) != record.size:
                        self._storages.resize_record(record, bytes_of(storage))
        if self.admission is not None:
            self.admission.update(None)

    def _call_with_effects(self, func: Any, effects: UndeclaredEffects, *args: Any, **kwargs: Any) -> Any:
        """Run an operation that may use tensors beyond the arguments.

        PyTorch disables a mode while the mode handles an operation, so nested operations are unseen. All
        storages are therefore reloaded before an operation that takes functions, and the mode is enabled
        again for a kernel in Python, whose operations count as the program's.
        """
        if effects.functions:
            self._transfers.reload_all()
        elif effects.keys is not None:
            self._set_operation_kind(2)
        return func(*args, **kwargs)

    def _apply_effects(
        self, effects: UndeclaredEffects, given: list[StorageRecord], made: list[StorageRecord]
    ) -> None:
        if effects.retains_tensors:
            for record in (*given, *made):
                self._transfers.hold_resident(record)
        if effects.leaves_unwritten:  # C++ functions write the new storage next, past the dispatcher
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
        self._transfers.end_native_moves()
        if self._storages.dead:
            self.remove_dead()
        if self.follower is not None and self.follower.is_following:
            self.follower.register_made()  # they may be evicted too
        self._eviction.admit(needed, given, self.clock, ahead=not self._iterations.is_following)

    def make_room_for(self, record: StorageRecord) -> None:
        """Make room for an offloaded storage that code outside the mode needs.

        In other threads, make no room: the storages of the operation in progress could be evicted.
        """
        if record.state == OFFLOADED and threading.get_ident() == self._transfers.thread:
            self.admit(record.rounded_bytes, [])

    def _can_retry(self, traits: OperatorTraits, given: list[StorageRecord]) -> bool:
        """Return whether an operation that ran out of memory may be retried, after evicting other storages.

        Three classes of operations are not retried: those that write, since the memory may be written
        already, or an output may have a new shape without memory; those that draw random numbers, since
        numbers may be drawn already; and those with kernels of the program, which may count or print.
        """
        if traits.function not in NATIVE:
            return False
        if traits.writes or torch.Tag.nondeterministic_seeded in getattr(traits.function, "tags", ()):
            return False
        if self.bypass is not None and self.bypass.is_open:
            self.close_bypass()
        return self._eviction.clear({record.key for record in given}, self.clock)

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
                self._storages.resize_record(record, bytes_of(storage))
            given.append(record)
            if written is not None:
                written.append(record)

    def known_record(self, tensor: torch.Tensor, storage: Any) -> StorageRecord | None:
        """Return the record of a storage that any operation of the program used; None for others."""
        self._transfers.end_native_moves()
        record = self._storages.find(storage)
        if record is None and self.follower is not None and self.follower.adopt(tensor, storage):
            record = self._storages.find(storage)
        return record

    def record_of(self, tensor: torch.Tensor, storage: Any) -> StorageRecord | None:
        """Return the record of a storage; register an unknown storage first."""
        if (record := self.known_record(tensor, storage)) is None:
            record = self._storages.register(tensor, storage, None, self.clock)
            if record is not None:
                if self.follower is not None:
                    self.follower.synchronize()
                self._iterations.record_argument(record)
        return record

    def _register_results(self, result: Any) -> list[StorageRecord]:
        """Register and return the new storages among an operation's results."""
        made: list[StorageRecord] = []
        records, register = self._records, self._storages.register
        at = len(self._iterations.current.functions)
        for plain, storage in storages_in(result):
            record = records.get(id(storage))
            if record is None or record() is not storage:
                record = register(plain, storage, (at, len(made)), self.clock)
                if record is not None:
                    made.append(record)
        return made

    def remove_dead(self) -> None:
        """Remove dead storages and their host copies; repeat an interrupted removal after a Ctrl-C."""
        for record in self._storages.take_dead():
            if record.copy is not None:
                self._transfers.end_native_moves()
                self._engine.drop(record.copy)
                record.copy = None
            self._iterations.record_death(record)

    def record_entries(self) -> None:
        """Record the accesses of loops over single entries as accesses by the previous operation."""
        for tensor, written in interposer.accessed_by_entries():
            if (record := self._storages.find(tensor.untyped_storage())) is not None:
                record.last = self.clock
                self._iterations.record_view(record, written=written)
