"""One trace of two: what a pool allocates and frees, and what a recorder of arrays sees them used for.

Both have the host's monotonic clock. A pool's buffer and a recorder's are one where the recorder first saw
its own at the pool's address in the pool's lifetime.
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
class Joined:
    """The columns of a trace and its metadata."""

    table: Table
    metadata: dict[str, str]


def join(pools: list[tuple[int, Trace]], seen: Table, names: list[int]) -> Joined:
    """Put the events of pools and of a recorder in their order.

    Args:
        pools: of each device its index and what its pool did, with addresses.
        seen: columns of the recorder, as `traces.recorders.arrays.rows.FIELDS` and ``category``.
        names: what the pools' names are among the recorder's.
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
    return Joined(joined, metadata)


def _of_pools(pools: list[tuple[int, Trace]], seen: Table, names: list[int]) -> Table:
    """The pools' events one after the other, each with its place in time; ids and threads are of one only."""
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
        # A buffer that takes another's memory comes before its free, whose time is earlier.
        part["order"] = np.maximum.accumulate(part["time_ns"])
        buffers = int(part["buffer"].max(initial=buffers - 1)) + 1
        threads = int(part["thread"].max(initial=threads - 1)) + 1
        once = (part["kind"] != Kind.MARK) | (not parts)  # marks are of all devices
        parts.append({name: values[once] for name, values in part.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _matches(table: Table, seen: Table) -> NDArray[np.int64]:
    """Of each alloc of the recorder the row of the pool's, -1 where there is none, int64[its allocs]."""
    born = np.flatnonzero(table["kind"] == Kind.ALLOC)
    born = born[np.lexsort((table["order"][born], table["address"][born]))]
    mine = np.flatnonzero(seen["kind"] == Kind.ALLOC)
    if not len(born):
        return np.full(len(mine), -1)
    # The last alloc at the same address that was there when the recorder saw it: ranks make one key of two.
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
    """When each of the pools' buffers was freed, int64[buffers]; the largest number: not yet."""
    ends = np.full(int(table["buffer"].max(initial=-1)) + 1, np.iinfo(np.int64).max)
    freed = table["kind"] == Kind.FREE
    ends[table["buffer"][freed]] = table["order"][freed]
    return ends


def _tell(table: Table, seen: Table, match: NDArray[np.int64]) -> None:
    """Give the pools' allocs what the recorder knows of them: operation, category, source line."""
    mine = np.flatnonzero(seen["kind"] == Kind.ALLOC)
    rows, mine = match[match >= 0], mine[match >= 0]
    for name in ("operation", "category", "frame", "began"):
        table[name][rows] = seen[name][mine]
    if len(np.unique(seen["thread"])) > 1:
        return
    # Temporaries: made by the only thread that is recorded, while an operation of it ran.
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
    """The recorder's events but for allocs and frees of the pools, under the ids and threads of the pools."""
    allocs = np.flatnonzero(seen["kind"] == Kind.ALLOC)
    pools = int(table["buffer"].max(initial=-1)) + 1
    count = int(seen["buffer"].max(initial=-1)) + 1
    row_of = np.full(count + 1, -1)  # and one for marks, whose buffer is -1
    row_of[seen["buffer"][allocs]] = match
    row, mark = row_of[seen["buffer"]], seen["buffer"] < 0
    theirs = (row >= 0) & ~mark
    kept = dict(seen)
    row = np.where(theirs, row, -1)
    kept["stream"] = np.append(table["stream"], 0)[row]  # the buffer's own: nobody tells of the operation's
    kept["buffer"] = np.where(theirs, np.append(table["buffer"], -1)[row], seen["buffer"] + pools)
    kept["buffer"][mark] = -1
    # Another thread may have known the buffer before the event that tells of it was written.
    born = np.full(count + 1, np.iinfo(np.int64).min)
    born[seen["buffer"][allocs]] = seen["time_ns"][allocs]
    kept["order"] = np.maximum(seen["time_ns"], born[seen["buffer"]])
    kept["thread"] = _threads(table, seen, allocs, match)
    keep = ~theirs | ((seen["kind"] != Kind.ALLOC) & (seen["kind"] != Kind.FREE))
    return {name: kept[name][keep] for name in table}


def _threads(
    table: Table, seen: Table, allocs: NDArray[np.int64], match: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The pools' numbers of the recorder's threads, by what they made; the others come after those."""
    known = (match >= 0) & (seen["began"][allocs] >= 0)
    others = int(table["thread"].max(initial=-1)) + 1
    number = np.arange(int(seen["thread"].max(initial=-1)) + 1) + others
    number[seen["thread"][allocs][known]] = table["thread"][match[known]]
    # Without a hole: threads that are none of the pools' are counted from there on.
    new = np.unique(number[number >= others])
    number = np.where(number >= others, others + np.searchsorted(new, number), number)
    result: NDArray[np.int64] = number[seen["thread"]]
    return result
