"""Follower of a schedule: a repeated iteration runs in C++, on a GPU with its moves (`native_moves`).

The interposer compares each operation with the schedule: the function, the shapes of the arguments, and
whether every argument is on the device. A matching operation runs without the mode. All others go to the
mode, which alone decides whether an iteration diverges. The expected operations are learned while the mode
still sees them. ``follower.hpp`` has the C++ half.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from mempool import _core
from mempool.recording.torch.ledger import storages_in
from mempool.torch.eager import interposer
from mempool.torch.eager.native_moves import MoveTable, NativeMoves
from mempool.torch.eager.storages import OFFLOADED
from mempool.torch.offload.hidden import hidden_from_program
from mempool.torch.offload.options import OPTIONS

if TYPE_CHECKING:
    from mempool.torch.eager.arena_admission import ArenaAdmission
    from mempool.torch.eager.iterations import Iterations
    from mempool.torch.eager.mode import OffloadMode
    from mempool.torch.eager.op_footprints import Footprint
    from mempool.torch.eager.operator_traits import OperatorTraits
    from mempool.torch.eager.patterns import OffloadSchedule
    from mempool.torch.eager.pool_headroom import PoolHeadroom
    from mempool.torch.eager.storages import StorageRecord

#: Actions due at an operation, as numbered in `follower.hpp`.
_BEFORE, _AFTER, _SEEN = 1, 2, 4
_PLACE_BITS = 16
_UNKNOWN, _OLDER = -1, -2


class ExpectedOperations:
    """The operations of one schedule, for comparison by the interposer.

    Attributes:
        handle: address of the table in C++.
        moving: rows of the schedule that move.
        table: the moves for C++; None before `complete`.
        is_ready: whether two successive iterations had these operations.
        is_unsettled: whether this iteration showed a new operation, or one whose workspace is not measured.
        peak_bytes: most bytes of storages and workspaces in the iterations that the mode saw.
    """

    def __init__(self, schedule: OffloadSchedule) -> None:
        """Start empty."""
        library = interposer.library()
        self.handle: int = library.mempool_follower_table()
        weakref.finalize(self, library.mempool_follower_free, self.handle).atexit = False
        self._schedule = schedule
        self.moving: set[int] = set()
        self.table: MoveTable | None = None
        self.is_ready = self.is_unsettled = False
        self.peak_bytes = 0

    def complete(self) -> None:
        """Set the actions due at each operation."""
        actions, recorded = bytearray(len(self._schedule)), self._schedule.recorded
        self.table = MoveTable(self._schedule)
        self.moving = moving = set(self.table.rows)
        for at, one in enumerate(self._schedule.actions):
            ends = one.after or one.dropped_copies or not moving.isdisjoint(one.results)
            actions[at] = (_BEFORE if one.before else 0) | (_AFTER if ends else 0)
        for (at, place), row in recorded.row_of_birth.items():
            if place < 0 and row in moving and at < len(actions):  # the mode must register the storage
                actions[at] |= _SEEN
        interposer.library().mempool_follower_set_actions(self.handle, bytes(actions), len(actions))
        self.table.set_in(self.handle)
        self.is_ready = True


class ScheduleFollower:
    """Starts and stops the interposer's following of a schedule, and makes the schedule's moves.

    Attributes:
        is_following: whether operations may run without the mode.
        calls: number of calls by the interposer, to make moves.
    """

    def __init__(
        self,
        mode: OffloadMode,
        client: _core.Client,
        headroom: PoolHeadroom,
        iterations: Iterations,
        admission: ArenaAdmission,
    ) -> None:
        """Start with the mode seeing all operations."""
        self._mode, self._client, self._headroom = mode, client, headroom
        self._iterations, self._admission = iterations, admission
        self._storages, self._transfers, self._operations = mode.storages, mode.transfers, mode.operations
        self._library = interposer.library()
        self._is_cuda = self._storages.device == "cuda"
        self._learning: ExpectedOperations | None = None
        self.is_following = False
        self._stream: Any = None  # of the followed operations
        self.calls = 0
        self._passed_before = self._library.mempool_follower_count()
        if mode.engine.streams:
            self._transfers.native = NativeMoves(
                mode.engine, self._storages, self._transfers, mode.counts, self._register_result
            )
        self._native = self._transfers.native

    # --- iterations

    def begin_iteration(self) -> None:
        """Follow the predicted schedule, or learn its operations while the mode follows it."""
        pattern, mode = self._iterations.pattern, self._mode
        if not self._headroom.defers_registration:
            self.register_made()  # of a follower that has ended
        if pattern is not None and self._may_follow():
            if pattern.expected is None:
                pattern.expected = ExpectedOperations(pattern.schedule)
            if pattern.expected.is_ready:
                self._start(pattern.expected, 0)
            elif self._library.mempool_follower_await(id(mode), self._is_cuda):
                self._learning, pattern.expected.is_unsettled = pattern.expected, False
        if not self.is_following:
            self.register_made()
        self._headroom.defers_registration = self.is_following
        self._begin_native_moves()

    def _begin_native_moves(self) -> None:
        """Let C++ make the moves of the schedule that is followed from the beginning of an iteration."""
        if self._native is None:
            return
        table = self._expected.table if self.is_following else None
        if self._native.table is not table:
            self._transfers.end_native_moves()
        if table is not None and not self._admission.due:
            self._native.begin(table, self._iterations.bound_records)

    def continue_with_other(self) -> None:
        """Follow the schedule to which the iteration has just switched, from this operation on."""
        pattern = self._iterations.pattern
        if (
            pattern is not None
            and pattern.expected is not None
            and pattern.expected.is_ready
            and self._may_follow()
        ):
            self._start(pattern.expected, len(self._iterations.current))

    def _may_follow(self) -> bool:
        """Return whether the moves are final and no new arena is due."""
        iterations = self._iterations
        return (
            iterations.is_final
            and (self._admission.restores or not self._admission.due)
            and (self._headroom.has_places or self._admission.is_refused)
            and not self._transfers.captures
            and threading.get_ident() == self._transfers.thread
        )

    def _start(self, expected: ExpectedOperations, at: int) -> None:
        interposer.set_follower(self)  # first, as Ctrl-C may come between
        self._expected, self.is_following = expected, True
        self._stream = self._mode.engine.current_stream()
        self.is_following = bool(
            self._library.mempool_follower_start(
                expected.handle,
                at,
                self._admission.due,
                id(self._mode),
                self._is_cuda,
                _core.torch_misses_function(),
                _core.torch_unplanned_function(),
                _core.torch_room_function(),
                self._client.handle,
                self._headroom.misses_before,
                self._headroom.is_checked,
                self._headroom.limit_bytes // OPTIONS.checked_operation_divisor,
                self._storages.foreign_bytes,
            )
        )

    def end_iteration(self, peak_bytes: int) -> int:
        """Stop at the end of an iteration.

        Return its peak bytes, at least the `peak_bytes` that the mode saw.
        """
        expected = self._expected if self.is_following else self._learning
        if self.is_following:
            self.synchronize()
            if self._iterations.has_followed_schedule:
                if self._native is not None:
                    self._native.end_iteration()
                self.register_made(older=True)
                self._library.mempool_follower_end_iteration()
            else:
                self.take_over()
        elif self._learning is not None and self._iterations.has_followed_schedule:
            if self._learning.is_unsettled:
                self._learning.peak_bytes = peak_bytes
            else:
                self._learning.complete()
        self._stop_following()
        return peak_bytes if expected is None else max(peak_bytes, expected.peak_bytes)

    def stop(self) -> None:
        """Let the mode see all operations; without a later `take_over`, stop following this iteration."""
        self._transfers.end_native_moves()
        self._stop_following()

    def _stop_following(self) -> None:
        if self.is_following or self._learning is not None:
            self._library.mempool_follower_stop()
        self.is_following, self._learning = False, None

    # --- operations that the mode sees

    def learn(self, traits: OperatorTraits, at: int, footprint: Footprint, *, passes: bool) -> None:
        """Learn operation number `at` of the schedule; `passes`: whether the operation may skip the mode."""
        if (expected := self._learning) is None:
            return
        function = traits.function
        schema = getattr(function, "_schema", None)
        passes = passes and schema is not None and traits.may_be_followed
        need = footprint.result_bytes + footprint.workspace_bytes if passes else -1
        names = (b"", b"") if schema is None else (schema.name.encode(), schema.overload_name.encode())
        known = self._library.mempool_follower_learn(expected.handle, at, *names, need)
        expected.is_unsettled |= not known or (
            passes and traits.may_pass and footprint.samples < OPTIONS.footprint_samples
        )

    def synchronize(self) -> None:
        """Append the operations that ran without the mode to the recording."""
        if self.is_following:
            self._iterations.skip_to(self._library.mempool_follower_position())

    def advance(self) -> None:
        """Move the interposer's position past the operations that the mode ran."""
        if self.is_following:
            self._library.mempool_follower_advance(len(self._iterations.current))

    def adopt(self, tensor: torch.Tensor, storage: Any) -> bool:
        """Register a storage that was made without the mode; return False for others."""
        code = self._library.mempool_follower_born(storage._cdata) if self.is_following else _UNKNOWN
        if code != _UNKNOWN:
            self._register(tensor, storage, code)
        return bool(code != _UNKNOWN)

    def take_over(self) -> None:
        """Stop; register the storages that were made without the mode, and complete the recording."""
        self._transfers.end_native_moves()
        self.synchronize()
        was_following = self.is_following
        self._stop_following()
        if was_following:
            self.register_made()
            self._iterations.restore_recording()

    def register_made(self, *, older: bool = False) -> None:
        """Register storages that were made without the mode; `older`: those of earlier iterations."""
        library = self._library
        if not (library.mempool_follower_older() if older else library.mempool_follower_made()):
            return
        if not older:
            self._transfers.end_native_moves()
        with interposer.own_operations(), hidden_from_program():
            tensors, codes = torch.ops.mempool_interposer.made(older)
        for tensor, code in zip(tensors, codes, strict=True):
            self._register(tensor, tensor.untyped_storage(), code)

    def _register_result(self, tensor: torch.Tensor, birth: tuple[int, int]) -> StorageRecord | None:
        """Register a storage that was made without the mode by an operation of this iteration."""
        storage = tensor.untyped_storage()
        self._register(tensor, storage, birth[0] << _PLACE_BITS | birth[1])
        return self._storages.find(storage)

    def _register(self, tensor: torch.Tensor, storage: Any, code: int) -> None:
        """Register a storage unless known.

        `code`: the operation that made it, encoded as in `follower.hpp`.
        """
        if self._storages.find(storage) is not None:
            return
        birth = None if code < 0 else (code >> _PLACE_BITS, code & (1 << _PLACE_BITS) - 1)
        if (record := self._storages.register(tensor, storage, birth, self._operations.clock)) is None:
            return
        record.stream = self._stream  # another thread, which may register it, has another one
        if birth is None:
            self._iterations.current.initial_records.append(record)
        else:
            self._iterations.bind(record)

    # --- called by the interposer

    def before(self, absent: list[torch.Tensor], at: int) -> None:
        """Make the moves due before operation `at`, and reload the arguments that are absent."""
        self.calls += 1
        self._transfers.end_native_moves()
        if self._storages.dead:
            self._operations.remove_dead()
        self._iterations.move_before(at, ())
        records = [
            record
            for tensor in absent
            for _, storage in storages_in(tensor)
            if (record := self._storages.find(storage)) is not None
        ]
        if any(record.state == OFFLOADED for record in records):
            self._iterations.skip_to(at)
            self._operations.admit(0, records)
        else:
            self._transfers.reload_each(records)
        self._iterations.note_finished_reloads(at)

    def after(self, results: list[torch.Tensor], at: int) -> None:
        """Start the offloads due after operation `at`; `results`: its new storages, uint8[n] each."""
        self.calls += 1
        self._transfers.end_native_moves()
        if self._storages.dead:
            self._operations.remove_dead()  # copies of dead storages may lie at the planned places
        rows = self._iterations.actions[at].results
        for place, (tensor, row) in enumerate(zip(results, rows, strict=False)):
            if row in self._expected.moving:
                self._register(tensor, tensor.untyped_storage(), at << _PLACE_BITS | place)
        self._iterations.move_after(at, ())

    @property
    def followed_operations(self) -> int:
        """Return the number of operations that ran without the mode."""
        return int(self._library.mempool_follower_count() - self._passed_before)
