"""Offloads and reloads of single storages, each safe at any moment."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mempool.logs import log
from mempool.torch.eager import interposer
from mempool.torch.eager.storages import (
    OFFLOADED,
    OFFLOADING,
    RELOADING,
    RESIDENT,
    StorageRecord,
    StorageRegistry,
    address_of,
    bytes_of,
    is_resizable,
)
from mempool.torch.offload.engine import HostFullError, OffloadRefusedError
from mempool.torch.offload.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mempool.torch.eager.native_moves import NativeMoves
    from mempool.torch.eager.patterns import OffloadSchedule
    from mempool.torch.offload.engine import Engine, HostCopy, Transfer


class TransferManager:
    """Offloads and reloads of storages, one at a time, with the states in `storages`.

    Ctrl-C may interrupt a move anywhere, and several threads may request moves at once. So the order of the
    lines matters: an interrupted record stays RESIDENT until its copy is valid, and may be OFFLOADED from
    then on. On a CPU, this class calls no operation of PyTorch, so an interrupt leaves none of PyTorch's
    guards open.

    An OFFLOADED or RELOADING storage points to its host copy, where unseen code finds the bytes.

    Attributes:
        lock: held while something moves.
        thread: the thread whose operations are planned; only that thread uses storages without lending.
        min_bytes: smaller storages do not move.
        holds_all: whether all storages stay on the device, since unseen operations may use them.
        captures: number of graphs being captured; meanwhile nothing is offloaded.
        writes: number of unseen writes after which `has_valid_copy` is true of each record.
        native: moves that the interposer makes; None without a pool.
        finished_reloads: (row of the plan, transfer) of each finished reload, until the reader clears the
            list.
    """

    def __init__(self, engine: Engine, storages: StorageRegistry, counts: OffloadCounters) -> None:
        self._engine = engine
        self._storages = storages
        self._counts = counts
        self._in_flight: dict[int, StorageRecord] = {}
        self.finished_reloads: list[tuple[int, Transfer]] = []
        self.lock = threading.RLock()
        self.thread = threading.get_ident()
        self.min_bytes = OPTIONS.min_storage_bytes
        self.holds_all = False
        self.captures = 0
        self._unseen_writes = interposer.unseen_writes()
        self.writes = self._unseen_writes.value
        self.native: NativeMoves | None = None

    @property
    def makes_native_moves(self) -> bool:
        """Return whether the interposer makes the moves, so that records are out of date."""
        return self.native is not None and self.native.table is not None

    def end_native_moves(self) -> None:
        """Let Python make the moves from now on; needed before any use of a record's state."""
        if (native := self.native) is not None and self.makes_native_moves:
            with self.lock:
                native.end()

    def offload(self, record: StorageRecord, at: int = -1) -> None:
        """Start an offload to the planned place `at` on the host, or to any place for -1."""
        with self.lock:
            self.end_native_moves()
            self._forget_stale_copies()
            if self._has_valid_copy(record):
                return
            if record.state == OFFLOADING:  # written since the copy was started
                self.wait(record)
            if record.state != RESIDENT or not self._may_offload(record):
                return
            self._free_copy(record)
            try:
                data = self._engine.bytes_of(record())
                record.copy, record.transfer = self._engine.offload(data, at)
            except HostFullError as error:
                self._note_full_host(error)
                return
            except OffloadRefusedError:
                return
            self._in_flight[record.number] = record
            interposer.watch(record())
            record.state, record.has_valid_copy = OFFLOADING, True
            self._counts.out_bytes += record.size

    def _note_full_host(self, error: HostFullError) -> None:
        self._counts.host_full += 1
        if self._counts.host_full == 1:
            log.warning(
                "%s: tensors without room there stay on the device, so the limit may be exceeded. A larger "
                "host_limit (MEMPOOL_HOST_LIMIT) makes room; the default is half of the free memory",
                str(error),  # a logged exception would keep tensors alive
            )

    def _has_valid_copy(self, record: StorageRecord) -> bool:
        """Return whether no operation wrote to a resident storage since the copy was started."""
        storage = record()
        record.has_valid_copy = (
            record.has_valid_copy and storage is not None and interposer.is_watched(storage)
        )
        return record.has_valid_copy

    def forget_stale_copies(self, records: Iterable[StorageRecord]) -> None:
        """Update whether these storages have valid copies."""
        self._forget_stale_copies()
        for record in records:
            if record.state == RESIDENT:
                self._has_valid_copy(record)

    def _forget_stale_copies(self) -> None:
        """Count all host copies as stale after an unseen operation that may have written."""
        if (writes := self._unseen_writes.value) != self.writes:
            for record in list(self._storages.records.values()):
                if record.state in (RESIDENT, OFFLOADING):
                    record.has_valid_copy = False
            self.writes = writes

    def drop_copy(self, record: StorageRecord) -> None:
        """Free the host copy of a storage, which the schedule does not read again."""
        with self.lock:
            self.end_native_moves()
            if record.state == RESIDENT and record.copy is not None:
                record.has_valid_copy = False
                self._free_copy(record)

    def _may_offload(self, record: StorageRecord) -> bool:
        """Return whether a storage may be offloaded: movable, unpinned and large enough.

        A size that the program changed is updated first.
        """
        if self.holds_all or self.captures or not record.movable or record.pins:
            return False
        if (storage := record()) is None:
            return False
        if bytes_of(storage) != record.size:
            self._storages.resize_record(record, bytes_of(storage))
        if record.size < self.min_bytes:
            return False
        record.movable = is_resizable(storage) and address_of(storage) != 0
        return record.movable

    def _free_copy(self, record: StorageRecord) -> None:
        if record.copy is not None:
            copy, record.copy = record.copy, None
            self._engine.drop(copy)

    def release(self, record: StorageRecord) -> None:
        """Free the device memory of a storage, once the offload has ended."""
        with self.lock:
            self.end_native_moves()
            self.wait(record)
            self._forget_stale_copies()
            if record.state != RESIDENT or not self._may_offload(record) or not self._has_valid_copy(record):
                return
            self._engine.fence()
            self._storages.set_resident(record, OFFLOADED)
            if not interposer.park(record(), self._engine.address(record.copy), self.writes):
                self._storages.set_resident(record, RESIDENT)
                return
            self._storages.mark_owned(record)

    def reload(self, record: StorageRecord) -> None:
        """Allocate device memory for a storage and start the reload."""
        with self.lock:
            self.end_native_moves()
            if record.state != OFFLOADED or record.copy is None or (storage := record()) is None:
                return
            self._engine.check_reload()  # before allocating: a capture allocates from the graph's memory
            # A program may free a tensor whose last use was on the tensor's own stream.
            with self._engine.on(record.stream):
                record.landing = interposer.landing_for(storage, record.size)
                self._start_reload(record, record.copy)
            self._in_flight[record.number] = record
            self._storages.set_resident(record, RELOADING)
            self._counts.in_bytes += record.size

    def _start_reload(self, record: StorageRecord, copy: HostCopy) -> Transfer:
        record.writes = interposer.copy_writes()
        record.transfer = transfer = self._engine.reload(copy, self._engine.bytes_of(record.landing))
        return transfer

    def _land(self, record: StorageRecord, storage: Any) -> None:
        """Move a storage into its new memory; copy again if the host copy may have been written meanwhile."""
        while not interposer.land(storage, record.landing, record.writes) and record.copy is not None:
            self._engine.wait(self._start_reload(record, record.copy))

    def wait(self, record: StorageRecord) -> None:
        """Wait for the transfer of a storage."""
        with self.lock:
            self.end_native_moves()
            if (transfer := record.transfer) is None:
                return
            try:
                self._counts.add_wait(self._engine.wait(transfer))
            except RuntimeError:  # the copy failed
                leaving = record.state != RELOADING
                self._storages.set_resident(record, RESIDENT if leaving else OFFLOADED)
                record.transfer, record.landing, record.has_valid_copy = None, None, not leaving
                self._in_flight.pop(record.number, None)
                if not leaving:
                    raise
            if record.state == RELOADING and (storage := record()) is not None:
                self._land(record, storage)
            if record.state == RELOADING and record.row >= 0:
                self.finished_reloads.append((record.row, transfer))
            if record.state in (OFFLOADING, RELOADING):
                record.state = RESIDENT
            record.transfer = record.landing = None
            self._in_flight.pop(record.number, None)

    def reload_now(self, record: StorageRecord) -> None:
        """Reload a storage and wait for the reload, also on a stream that waited for no earlier reload."""
        with self.lock:
            self.end_native_moves()
            self._engine.note_stream()
            if record.state == OFFLOADED:
                self._counts.on_demand += 1
                self.reload(record)
            if record.state == RELOADING:
                self.wait(record)

    def reload_each(self, absent: Iterable[StorageRecord]) -> None:
        """Reload several storages; all reloads start before the first is waited for."""
        absent = list(absent)
        with self.lock:
            self.end_native_moves()
            for record in absent:
                if record.state == OFFLOADED:
                    self._counts.on_demand += 1
                    self.reload(record)
            for record in absent:
                if record.state == RELOADING:
                    self.wait(record)

    def lend(self, record: StorageRecord) -> bool:
        """Reload and pin a storage until `give_back`; return whether the storage was offloaded."""
        with self.lock:
            self.end_native_moves()
            away = record.state == OFFLOADED
            record.pins += 1
            try:
                self.reload_now(record)
            except BaseException:
                record.pins -= 1
                raise
            return away

    def give_back(self, record: StorageRecord, *, away: bool, wrote: bool) -> None:
        """Unpin a lent storage; if offloaded before and still unmodified, offload the storage again."""
        with self.lock:
            self.end_native_moves()
            if wrote:
                record.has_valid_copy = False
            record.pins -= 1
            if away and threading.get_ident() == self.thread:  # else an operation may be using the storage
                self.release(record)

    def hold_resident(self, record: StorageRecord) -> None:
        """Reload a storage and keep it on the device permanently, since other code knows the address."""
        with self.lock:
            self.end_native_moves()
            record.movable = False
            self.reload_now(record)

    def wait_all(self) -> None:
        """Wait for all transfers under way.

        A transfer keeps even an unused storage alive until waited for.
        """
        self.end_native_moves()
        for record in list(self._in_flight.values()):
            self.wait(record)

    def reload_all(self) -> None:
        """Reload every storage."""
        self.wait_all()
        for record in list(self._storages.records.values()):
            self.reload_now(record)


@dataclass
class OffloadCounters:
    """Counters since the start; bytes and seconds.

    Attributes:
        iterations: ended iterations.
        plans: schedules made.
        margin_bytes: difference between the limit and the schedule's limit: the pool reserves more than the
            live bytes.
        changes: changes of schedules after waits.
        peak_bytes: peak of the resident bytes while operations were seen.
        out_bytes: bytes offloaded.
        in_bytes: bytes reloaded.
        iteration_out_bytes: bytes offloaded in the last iteration.
        iteration_in_bytes: bytes reloaded in the last iteration.
        on_demand: storages that an operation needed and no schedule had reloaded.
        evicted: storages evicted because room was needed at once.
        delayed_reloads: planned reloads that lacked room at their planned time.
        over_limit: operations that began above the limit because no storage could be evicted.
        diverged: iterations that left the schedule.
        host_full: copies that did not fit into the host's arena.
        other_threads: operations of other threads, for which schedules do not plan.
        bypassed: operations that skipped the mode, since nothing had to move.
        waits: transfers that operations waited for.
        waited_seconds: total time of these waits.
    """

    iterations: int = 0
    plans: int = 0
    changes: int = 0
    margin_bytes: int = 0
    peak_bytes: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    iteration_out_bytes: int = 0
    iteration_in_bytes: int = 0
    on_demand: int = 0
    evicted: int = 0
    delayed_reloads: int = 0
    over_limit: int = 0
    diverged: int = 0
    host_full: int = 0
    other_threads: int = 0
    bypassed: int = 0
    waits: int = 0
    waited_seconds: float = 0.0
    _out_before: int = 0
    _in_before: int = 0

    def end_iteration(self) -> None:
        """Record the end of an iteration."""
        self.iterations += 1
        self.iteration_out_bytes = self.out_bytes - self._out_before
        self.iteration_in_bytes = self.in_bytes - self._in_before
        self._out_before, self._in_before = self.out_bytes, self.in_bytes

    def add_wait(self, seconds: float) -> None:
        """Record a wait for a copy, unless the wait took no time."""
        self.waits += seconds > 0
        self.waited_seconds += seconds


def report_values(counts: OffloadCounters, plan: OffloadSchedule | None) -> dict[str, Any]:
    """Return the counters and the plan's numbers, for JSON; without a plan, the latter are None."""
    values: dict[str, Any] = {k: v for k, v in asdict(counts).items() if not k.startswith("_")}
    values |= dict.fromkeys(("planned_peak_bytes", "unplanned_peak_bytes", "moves", "planned_stall_seconds"))
    if plan is not None:
        values["planned_peak_bytes"] = plan.swap.peak_bytes
        values["unplanned_peak_bytes"] = plan.recorded.step.peak_bytes
        values["moves"] = len(plan.swap.schedule)
        values["planned_stall_seconds"] = plan.swap.stall_seconds
    return values
