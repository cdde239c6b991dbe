"""Recorder of the accesses of arrays together with the allocations and frees of their pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mempool import _core
from mempool.errors import UsageError
from mempool.pool import Pool
from mempool.recording.arrays import ArrayRecorder
from mempool.recording.events import EventConverter
from traces import EventType

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

    from mempool.cupy import CupyPool
    from traces import Trace

    Table = dict[str, NDArray[Any]]


def record_arrays(pool: Pool | CupyPool | None = None, *, frames: bool = False) -> ArrayRecorder:
    """Return a recorder of NumPy's and CuPy's array operations; a context manager.

        with record_arrays(pool) as recorder:
            x = recorder.watch(x)
            ...
        trace = recorder.trace()

    Args:
        pool: pool whose allocations and frees are recorded too, with temporaries inside of operations, on the
            devices that the pool has used so far; None: only the recorder's own events.
        frames: keep source lines.

    Raises:
        UsageError: the pool writes a trace file, is closed, or was traces with ``check=True``.
    """
    chosen = [] if pool is None else _pools(pool)
    return PoolRecorder(chosen, frames=frames) if chosen else ArrayRecorder(frames=frames)


def _pools(pool: Pool | CupyPool) -> list[tuple[int, Pool]]:
    """Return the pool of each device; none if the pool is off."""
    if pool.settings.mode == "off":
        return []
    if pool.state == "closed":
        raise UsageError("the pool is closed: what is to be recorded comes while it serves")
    if pool.settings.record is not None:
        raise UsageError("the pool writes a trace file: record accesses without record=")
    if pool.settings.check:
        raise UsageError("check=True puts arrays between redzones: record accesses without it")
    if isinstance(pool, Pool):
        return [(0, pool)]
    return sorted((pool.pools or {0: pool.pool(0)}).items())


class PoolRecorder(ArrayRecorder):
    """An `ArrayRecorder` that also records all allocations and frees of the pools inside the context."""

    def __init__(self, pools: list[tuple[int, Pool]], *, frames: bool) -> None:
        super().__init__(frames=frames)
        self._rows.addresses = True
        self._pools = pools
        self._taken: dict[int, list[bytes]] = {device: [] for device, _ in pools}

    def __enter__(self) -> Self:
        super().__enter__()
        for _, pool in self._pools:
            pool.client.set_tracing(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, pool in self._pools:
            pool.client.set_tracing(False)
        super().__exit__(kind, error, trace)

    def trace(self) -> Trace:
        """Return the trace of all events so far.

        Raises:
            MemoryError: the machine had no memory left to keep all events.
        """
        with _core.Bypass():  # keeps its own allocations out of the trace
            traces = []
            for device, pool in self._pools:
                while packed := pool.client.take_trace():
                    self._taken[device].append(packed)
                if lost := pool.client.state()["trace_lost"]:
                    raise MemoryError(f"no room for {lost:,} events of the pool")
                recording = EventConverter(pool.device.alignment, addresses=True)
                traces.append((device, recording.trace(b"".join(self._taken[device]))))
            names = [self._rows.name(name) for _, trace in traces for name in trace.names]
            joined = merge_traces(traces, self._table(), names)
            alignment = str(max(pool.device.alignment for _, pool in self._pools))
            return self._trace(joined.table, alignment=alignment, **joined.metadata)


@dataclass(frozen=True)
class MergedTrace:
    """Columns and metadata of the merged trace."""

    table: Table
    metadata: dict[str, str]


def merge_traces(pools: list[tuple[int, Trace]], recorded: Table, names: list[int]) -> MergedTrace:
    """Merge the events of pools and of a recorder in order of time.

    Args:
        pools: index of each device, and the trace of the pool there, with addresses.
        recorded: columns of the recorder: `mempool.recording.arrays.rows.FIELDS` and ``category``.
        names: indices of the pools' names among the recorder's names.
    """
    table = _of_pools(pools, recorded, names)
    match = _matches(table, recorded)
    _copy_attributes(table, recorded, match)
    kept = _of_recorder(table, recorded, match)
    joined = {name: np.concatenate([table[name], kept[name]]) for name in table}
    order = np.lexsort((np.arange(len(joined["kind"])), joined.pop("order")))
    joined = {name: values[order] for name, values in joined.items()}
    untouched = (table["kind"] == EventType.ALLOC) & ~np.isin(table["buffer"], kept["buffer"])
    metadata = {
        "untouched_buffers": str(int(untouched.sum())),
        "untouched_bytes": str(int(table["size"][untouched].sum())),
        "foreign_buffers": str(int((kept["kind"] == EventType.ALLOC).sum())),
    }
    return MergedTrace(joined, metadata)


def _of_pools(pools: list[tuple[int, Trace]], recorded: Table, names: list[int]) -> Table:
    """Concatenate the pools' events with their time order; make ids and threads unique among pools."""
    parts: list[Table] = []
    buffers = threads = 0
    for device, trace in pools:
        part: Table = {
            name: getattr(trace, name).astype(np.int64)
            for name in (*recorded, "stream")
            if hasattr(trace, name)
        }
        part["buffer"] = np.where(part["buffer"] >= 0, part["buffer"] + buffers, -1)
        part["operation"] = np.array([*names, -1], np.int64)[part["operation"]]
        part["thread"] += threads
        part["device"][:] = device
        part["began"] = np.full(len(trace), -1)
        # A buffer that takes another's memory precedes the other's free, which has the earlier time.
        part["order"] = np.maximum.accumulate(part["time_ns"])
        buffers = int(part["buffer"].max(initial=buffers - 1)) + 1
        threads = int(part["thread"].max(initial=threads - 1)) + 1
        once = (part["kind"] != EventType.MARK) | (not parts)  # marks are common to all devices
        parts.append({name: values[once] for name, values in part.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _matches(table: Table, recorded: Table) -> NDArray[np.int64]:
    """Return the pool's row for each alloc of the recorder, -1 without one; int64[recorder's allocs]."""
    born = np.flatnonzero(table["kind"] == EventType.ALLOC)
    born = born[np.lexsort((table["order"][born], table["address"][born]))]
    mine = np.flatnonzero(recorded["kind"] == EventType.ALLOC)
    if not len(born):
        return np.full(len(mine), -1)
    # Find the last pool alloc at the same address before the recorder first saw the address (sorted by
    # address, time).
    key = np.concatenate([table["address"][born], recorded["address"][mine]])
    time = np.concatenate([table["order"][born], recorded["time_ns"][mine]])
    order = np.lexsort((np.arange(len(key)) >= len(born), time, key))
    last = np.maximum.accumulate(np.where(order < len(born), np.arange(len(order)), -1))
    found = np.full(len(key), -1)
    found[order] = np.where(last >= 0, order[last], -1)
    row = np.where(found[len(born) :] >= 0, born[found[len(born) :]], -1)
    ended = _ends(table)[table["buffer"][row]]
    fits = (
        (row >= 0)
        & (table["address"][row] == recorded["address"][mine])
        & (recorded["time_ns"][mine] < ended)
    )
    return np.where(fits, row, -1)


def _ends(table: Table) -> NDArray[np.int64]:
    """Return the time of each pool buffer's free, int64[buffers]; the largest number for live buffers."""
    ends = np.full(int(table["buffer"].max(initial=-1)) + 1, np.iinfo(np.int64).max)
    freed = table["kind"] == EventType.FREE
    ends[table["buffer"][freed]] = table["order"][freed]
    return ends


def _copy_attributes(table: Table, recorded: Table, match: NDArray[np.int64]) -> None:
    """Copy operation, category and source line of the recorder's allocs to the matching pool allocs."""
    mine = np.flatnonzero(recorded["kind"] == EventType.ALLOC)
    rows, mine = match[match >= 0], mine[match >= 0]
    for name in ("operation", "category", "frame", "began"):
        table[name][rows] = recorded[name][mine]
    if len(np.unique(recorded["thread"])) > 1:
        return
    # Attribute temporaries: allocs of the only recorded thread while an operation of that thread ran.
    began, first = np.unique(recorded["began"][recorded["began"] >= 0], return_index=True)
    of_operations = np.flatnonzero(recorded["began"] >= 0)[first]
    inner = (table["kind"] == EventType.ALLOC) & (table["operation"] < 0)
    inner &= np.isin(table["thread"], table["thread"][rows])
    at = np.flatnonzero(inner)
    before = np.searchsorted(began, table["time_ns"][at], side="right") - 1
    within = (before >= 0) & (
        table["time_ns"][at] <= recorded["time_ns"][of_operations[before]] if len(began) else False
    )
    table["operation"][at[within]] = recorded["operation"][of_operations[before[within]]]
    table["began"][at[within]] = began[before[within]]


def _of_recorder(table: Table, recorded: Table, match: NDArray[np.int64]) -> Table:
    """Return the recorder's events without allocs and frees of pool buffers, in the pools' ids."""
    allocs = np.flatnonzero(recorded["kind"] == EventType.ALLOC)
    pools = int(table["buffer"].max(initial=-1)) + 1
    count = int(recorded["buffer"].max(initial=-1)) + 1
    row_of = np.full(count + 1, -1)  # one more entry for marks, whose buffer is -1
    row_of[recorded["buffer"][allocs]] = match
    row, mark = row_of[recorded["buffer"]], recorded["buffer"] < 0
    theirs = (row >= 0) & ~mark
    kept = dict(recorded)
    row = np.where(theirs, row, -1)
    kept["stream"] = np.append(table["stream"], 0)[row]  # the buffer's stream, as the operation's is unknown
    kept["buffer"] = np.where(theirs, np.append(table["buffer"], -1)[row], recorded["buffer"] + pools)
    kept["buffer"][mark] = -1
    # Another thread may have used the buffer before the event of its first sight was written.
    born = np.full(count + 1, np.iinfo(np.int64).min)
    born[recorded["buffer"][allocs]] = recorded["time_ns"][allocs]
    kept["order"] = np.maximum(recorded["time_ns"], born[recorded["buffer"]])
    kept["thread"] = _threads(table, recorded, allocs, match)
    keep = ~theirs | ((recorded["kind"] != EventType.ALLOC) & (recorded["kind"] != EventType.FREE))
    return {name: kept[name][keep] for name in table}


def _threads(
    table: Table, recorded: Table, allocs: NDArray[np.int64], match: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the pools' numbers of the recorder's threads, matched by their allocs; new ones follow."""
    known = (match >= 0) & (recorded["began"][allocs] >= 0)
    others = int(table["thread"].max(initial=-1)) + 1
    number = np.arange(int(recorded["thread"].max(initial=-1)) + 1) + others
    number[recorded["thread"][allocs][known]] = table["thread"][match[known]]
    # Number the new threads without gaps.
    new = np.unique(number[number >= others])
    number = np.where(number >= others, others + np.searchsorted(new, number), number)
    result: NDArray[np.int64] = number[recorded["thread"]]
    return result
