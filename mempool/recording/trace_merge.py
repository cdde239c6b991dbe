"""Merge of two traces: allocations and frees of pools, and accesses seen by an array recorder.

Both use the host's monotonic clock. A buffer of the recorder is the pool's buffer at the same address if the
recorder first saw the address during that buffer's lifetime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from traces import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces import Trace

    Table = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class MergedTrace:
    """Columns and metadata of the merged trace."""

    table: Table
    metadata: dict[str, str]


def join(pools: list[tuple[int, Trace]], seen: Table, names: list[int]) -> MergedTrace:
    """Merge the events of pools and of a recorder in order of time.

    Args:
        pools: index of each device, and the trace of the pool there, with addresses.
        seen: columns of the recorder: `mempool.recording.arrays.rows.FIELDS` and ``category``.
        names: indices of the pools' names among the recorder's names.
    """
    table = _of_pools(pools, seen, names)
    match = _matches(table, seen)
    _tell(table, seen, match)
    kept = _of_recorder(table, seen, match)
    joined = {name: np.concatenate([table[name], kept[name]]) for name in table}
    order = np.lexsort((np.arange(len(joined["kind"])), joined.pop("order")))
    joined = {name: values[order] for name, values in joined.items()}
    untouched = (table["kind"] == Kind.ALLOC) & ~np.isin(table["buffer"], kept["buffer"])
    metadata = {
        "untouched_buffers": str(int(untouched.sum())),
        "untouched_bytes": str(int(table["size"][untouched].sum())),
        "foreign_buffers": str(int((kept["kind"] == Kind.ALLOC).sum())),
    }
    return MergedTrace(joined, metadata)


def _of_pools(pools: list[tuple[int, Trace]], seen: Table, names: list[int]) -> Table:
    """Concatenate the pools' events with their time order; make ids and threads unique among pools."""
    parts: list[Table] = []
    buffers = threads = 0
    for device, trace in pools:
        part: Table = {
            name: getattr(trace, name).astype(np.int64) for name in (*seen, "stream") if hasattr(trace, name)
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
        once = (part["kind"] != Kind.MARK) | (not parts)  # marks are common to all devices
        parts.append({name: values[once] for name, values in part.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _matches(table: Table, seen: Table) -> NDArray[np.int64]:
    """Return the pool's row for each alloc of the recorder, -1 without one; int64[recorder's allocs]."""
    born = np.flatnonzero(table["kind"] == Kind.ALLOC)
    born = born[np.lexsort((table["order"][born], table["address"][born]))]
    mine = np.flatnonzero(seen["kind"] == Kind.ALLOC)
    if not len(born):
        return np.full(len(mine), -1)
    # Find the last pool alloc at the same address before the recorder first saw the address (sorted by
    # address, time).
    key = np.concatenate([table["address"][born], seen["address"][mine]])
    time = np.concatenate([table["order"][born], seen["time_ns"][mine]])
    order = np.lexsort((np.arange(len(key)) >= len(born), time, key))
    last = np.maximum.accumulate(np.where(order < len(born), np.arange(len(order)), -1))
    found = np.full(len(key), -1)
    found[order] = np.where(last >= 0, order[last], -1)
    row = np.where(found[len(born) :] >= 0, born[found[len(born) :]], -1)
    ended = _ends(table)[table["buffer"][row]]
    fits = (row >= 0) & (table["address"][row] == seen["address"][mine]) & (seen["time_ns"][mine] < ended)
    return np.where(fits, row, -1)


def _ends(table: Table) -> NDArray[np.int64]:
    """Return the time of each pool buffer's free, int64[buffers]; the largest number for live buffers."""
    ends = np.full(int(table["buffer"].max(initial=-1)) + 1, np.iinfo(np.int64).max)
    freed = table["kind"] == Kind.FREE
    ends[table["buffer"][freed]] = table["order"][freed]
    return ends


def _tell(table: Table, seen: Table, match: NDArray[np.int64]) -> None:
    """Copy operation, category and source line of the recorder's allocs to the matching pool allocs."""
    mine = np.flatnonzero(seen["kind"] == Kind.ALLOC)
    rows, mine = match[match >= 0], mine[match >= 0]
    for name in ("operation", "category", "frame", "began"):
        table[name][rows] = seen[name][mine]
    if len(np.unique(seen["thread"])) > 1:
        return
    # Attribute temporaries: allocs of the only recorded thread while an operation of that thread ran.
    began, first = np.unique(seen["began"][seen["began"] >= 0], return_index=True)
    of_operations = np.flatnonzero(seen["began"] >= 0)[first]
    inner = (table["kind"] == Kind.ALLOC) & (table["operation"] < 0)
    inner &= np.isin(table["thread"], table["thread"][rows])
    at = np.flatnonzero(inner)
    before = np.searchsorted(began, table["time_ns"][at], side="right") - 1
    within = (before >= 0) & (
        table["time_ns"][at] <= seen["time_ns"][of_operations[before]] if len(began) else False
    )
    table["operation"][at[within]] = seen["operation"][of_operations[before[within]]]
    table["began"][at[within]] = began[before[within]]


def _of_recorder(table: Table, seen: Table, match: NDArray[np.int64]) -> Table:
    """Return the recorder's events without allocs and frees of pool buffers, in the pools' ids."""
    allocs = np.flatnonzero(seen["kind"] == Kind.ALLOC)
    pools = int(table["buffer"].max(initial=-1)) + 1
    count = int(seen["buffer"].max(initial=-1)) + 1
    row_of = np.full(count + 1, -1)  # one more entry for marks, whose buffer is -1
    row_of[seen["buffer"][allocs]] = match
    row, mark = row_of[seen["buffer"]], seen["buffer"] < 0
    theirs = (row >= 0) & ~mark
    kept = dict(seen)
    row = np.where(theirs, row, -1)
    kept["stream"] = np.append(table["stream"], 0)[row]  # the buffer's stream, as the operation's is unknown
    kept["buffer"] = np.where(theirs, np.append(table["buffer"], -1)[row], seen["buffer"] + pools)
    kept["buffer"][mark] = -1
    # Another thread may have used the buffer before the event of its first sight was written.
    born = np.full(count + 1, np.iinfo(np.int64).min)
    born[seen["buffer"][allocs]] = seen["time_ns"][allocs]
    kept["order"] = np.maximum(seen["time_ns"], born[seen["buffer"]])
    kept["thread"] = _threads(table, seen, allocs, match)
    keep = ~theirs | ((seen["kind"] != Kind.ALLOC) & (seen["kind"] != Kind.FREE))
    return {name: kept[name][keep] for name in table}


def _threads(
    table: Table, seen: Table, allocs: NDArray[np.int64], match: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the pools' numbers of the recorder's threads, matched by their allocs; new ones follow."""
    known = (match >= 0) & (seen["began"][allocs] >= 0)
    others = int(table["thread"].max(initial=-1)) + 1
    number = np.arange(int(seen["thread"].max(initial=-1)) + 1) + others
    number[seen["thread"][allocs][known]] = table["thread"][match[known]]
    # Number the new threads without gaps.
    new = np.unique(number[number >= others])
    number = np.where(number >= others, others + np.searchsorted(new, number), number)
    result: NDArray[np.int64] = number[seen["thread"]]
    return result
