"""Moves of a followed schedule on a GPU that the interposer makes without Python (``moves.hpp``).

While the native moves are on, the records of the storages that move are out of date. So whatever uses such a
record ends the native moves first (`TransferManager.end_native_moves`); the next iteration begins them again.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING

import torch

from mempool.torch.eager import interposer
from mempool.torch.eager.patterns import RELEASE
from mempool.torch.eager.storages import OFFLOADED, RESIDENT
from mempool.torch.offload.hidden import hidden_from_program

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.torch.eager.patterns import OffloadSchedule
    from mempool.torch.eager.storages import StorageRecord, StorageRegistry
    from mempool.torch.eager.transfers import OffloadCounters, TransferManager
    from mempool.torch.offload.engine import Engine, NativeCopies

#: `Move::Kind` in `moves.hpp`.
_RELEASE, _RELOAD, _BIND, _DROP_COPY, _OFFLOAD = range(5)
_numbers = itertools.count(1)


class MoveTable:
    """The moves of a schedule, in the form of `moves.hpp`.

    Attributes:
        rows: the schedule's rows that move.
        births: (operation, index among the new storages) of each row that an operation of the iteration
            makes; None for a persistent storage.
        moves: per move: operation, kind, index in `rows`, and offset on the host or index among the results.
        host_bytes: size of the range on the host that has all copies.
        handle: address of the follower's table; 0 before `set_in`.
        is_complete: whether `moves.hpp` can make all moves, as far as known; False without moves.
    """

    def __init__(self, schedule: OffloadSchedule) -> None:
        self.rows = sorted({row for one in schedule.actions for row, _ in one.after})
        index = {row: at for at, row in enumerate(self.rows)}
        born = {row: birth for birth, row in schedule.recorded.row_of_birth.items()}
        persistent = {row for row, _ in schedule.persistent_rows}
        self.births = [born.get(row) for row in self.rows]
        self.is_complete = bool(self.rows) and all(
            row in persistent if birth is None else birth[1] >= 0
            for row, birth in zip(self.rows, self.births, strict=True)
        )
        self.bytes = [int(schedule.row_bytes[row]) for row in self.rows]
        self.host_bytes = self.handle = 0
        self.moves: list[tuple[int, int, int, int]] = []
        for at, one in enumerate(schedule.actions):
            for action, row in one.before:
                self.moves.append((at, _RELEASE if action == RELEASE else _RELOAD, index[row], 0))
            for place, row in enumerate(one.results):
                if row in index:
                    self.moves.append((at, _BIND, index[row], place))
            for row in one.dropped_copies:
                self.moves.append((at, _DROP_COPY, index[row], 0))
            for row, place in one.after:
                self.moves.append((at, _OFFLOAD, index[row], place))
                self.host_bytes = max(self.host_bytes, place + int(schedule.row_bytes[row]))

    def set_in(self, handle: int) -> None:
        """Set the moves in the follower's table at this address."""
        self.handle, values = handle, [value for move in self.moves for value in move]
        interposer.library().mempool_follower_set_moves(
            handle, (ctypes.c_int64 * len(values))(*values), len(self.moves)
        )


class NativeMoves:
    """Begins and ends the native moves, and keeps the records of the storages true outside of them.

    Ctrl-C may interrupt `end` anywhere: the interposer keeps its state, and the next call repeats `end`.

    Attributes:
        table: the moves that are made natively at present; None if Python makes the moves.
    """

    def __init__(
        self,
        engine: Engine,
        storages: StorageRegistry,
        transfers: TransferManager,
        counts: OffloadCounters,
        register: Callable[[torch.Tensor, tuple[int, int]], StorageRecord | None],
    ) -> None:
        """Start with Python making the moves; `register` registers a storage with its birth."""
        self._engine, self._storages, self._transfers, self._counts = engine, storages, transfers, counts
        self._register = register
        self._library = interposer.library()
        self._lent: dict[int, StorageRecord] = {}  # persistent storages, by index in `MoveTable.rows`
        self._native: NativeCopies | None = None
        self._number = 0  # of the last beginning
        self._counted = (ctypes.c_int64 * 5)()
        self.table: MoveTable | None = None

    def begin(self, table: MoveTable, rows: dict[int, StorageRecord]) -> None:
        """Let the interposer make the moves from the beginning of an iteration, if possible.

        `rows`: records of the persistent storages, by row of the schedule.
        """
        if self.table is table or not table.is_complete:
            return
        with self._transfers.lock:
            if (lent := self._lend(table, rows)) is None:
                return
            if (copies := self._engine.native_copies(table.host_bytes)) is None:
                table.is_complete = False  # another attempt would wait for all transfers again
                return
            library, writes = self._library, self._transfers.writes
            sizes = (ctypes.c_int64 * len(table.bytes))(*table.bytes)
            self._number = next(_numbers)
            self._lent, self._native, self.table = lent, copies, table  # first, as Ctrl-C may come between
            library.mempool_moves_begin(
                self._number,
                table.handle,
                *copies.handles,
                self._transfers.min_bytes,
                self._storages.alignment,
                sizes,
                len(sizes),
            )
            for at, record in lent.items():
                away = record.state == OFFLOADED
                offset = record.copy.at if record.copy is not None and (away or record.has_valid_copy) else -1
                if (storage := record()) is not None:
                    library.mempool_moves_bind(at, storage._cdata, away, offset, writes)

    def _lend(self, table: MoveTable, rows: dict[int, StorageRecord]) -> dict[int, StorageRecord] | None:
        """Return the records of the table's persistent storages; None if one of them may not move."""
        lent: dict[int, StorageRecord] = {}
        for at, (row, birth) in enumerate(zip(table.rows, table.births, strict=True)):
            if birth is None:
                record = rows.get(row)
                if record is None or record() is None or not record.movable or record.pins:
                    return None
                lent[at] = record
        self._transfers.wait_all()
        left = [record for record in list(self._storages.records.values()) if record.copy is not None]
        self._transfers.forget_stale_copies(left)
        kept = {record.key for record in lent.values()}
        for record in left:
            if record.key not in kept or not record.has_valid_copy:
                self._transfers.drop_copy(record)  # of an eviction
        return lent

    def end(self) -> None:
        """Let Python make the moves from now on, and update the records."""
        if (table := self.table) is None or (native := self._native) is None:
            return
        with interposer.own_operations(), hidden_from_program():
            tensors, values = torch.ops.mempool_interposer.moved(self._number)
        found: list[tuple[StorageRecord, int, int]] = []
        for place, tensor in enumerate(tensors):
            at, state, copy = values[3 * place : 3 * place + 3]
            birth = table.births[at]
            known = self._lent.get(at) if birth is None else self._register(tensor, birth)
            if known is not None:
                found.append((known, state, copy))
        if self.table is not table:
            return  # a registration switched the schedule, which has ended the moves
        places = [(copy, known.size) for known, _, copy in found if copy >= 0]
        native.release([record.copy for record, _, _ in found if record.copy is not None], places)
        for record, state, copy in found:
            record.copy = native.copy_at(copy, record.size) if copy >= 0 else None
            record.has_valid_copy = copy >= 0
            self._storages.set_resident(record, OFFLOADED if state == OFFLOADED else RESIDENT)
            if state == OFFLOADED:
                self._storages.mark_owned(record)
        self.count()
        self.table, self._native, self._lent = None, None, {}

    def end_iteration(self) -> None:
        """End an iteration that followed the schedule to its end."""
        if self.table is not None:
            self.count()
            if not self._library.mempool_moves_end_iteration():
                self.end()

    def count(self) -> None:
        """Add the interposer's counts."""
        self._library.mempool_moves_counts(self._counted)
        out_bytes, in_bytes, delayed, waits, waited_nanoseconds = self._counted
        self._counts.out_bytes += out_bytes
        self._counts.in_bytes += in_bytes
        self._counts.delayed_reloads += delayed
        self._counts.waits += waits
        self._counts.waited_seconds += waited_nanoseconds / 1e9
