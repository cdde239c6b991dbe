"""Merge of two traces: a pool's allocs and frees, and the access recorder's view of the same memory."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from mempool.recording.torch.tracing import FOUND_STEP, STEP, named_only
from traces.trace import COLUMNS, NAMED, EventType, Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mempool.recording.torch import AccessRecorder
    from mempool.recording.torch.rows import Table

    Ints = NDArray[np.int64]

_OWN = (EventType.ALLOC, EventType.FREE)


def join(pool: Trace, seen: Trace, table: Table, recorder: AccessRecorder) -> Trace:
    """Merge the pool's allocs and frees with the recorder's accesses, marks and names.

    A storage and a pool's buffer are identified if the storage lay at the buffer's address within the
    buffer's
    life. An access gets the time at which the operation began, moved into the life of the accessed buffer,
    since
    an operation's outputs are allocated after the operation began. Storages that the pool did not serve are
    left
    out.

    Args:
        pool: the pool's trace, with addresses; its marks are dropped if the recorder has marks that end
            iterations.
        seen: the recorder's trace.
        table: the table of ``seen``.
        recorder: the source of the names.
    """
    named = (name for names in recorder.names for name in _shown(names))
    names = list(dict.fromkeys([*named, *seen.names, *pool.names, "temporaries"]))
    number = {name: at for at, name in enumerate(names)}
    seen, pool = _renamed(seen, names, number), _renamed(pool, names, number)
    alloc = np.flatnonzero(pool.kind == EventType.ALLOC)
    time = np.maximum.accumulate(pool.time_ns) if len(pool) else pool.time_ns
    until = _ends(pool)
    match = _matches(pool, alloc, time, until, table)  # row of the alloc, by the recorder's buffer
    columns = {name: getattr(pool, name).copy() for name in COLUMNS}
    _tell(columns, alloc, table, recorder, number, seen, match)
    if (seen.operation[seen.kind == EventType.MARK] == number.get(STEP, -1)).any():
        keep = pool.kind != EventType.MARK
    else:
        keep = np.ones(len(pool), np.bool_)
    own, at = _placed(seen, match, time, until, pool)
    rows = np.lexsort(
        (
            np.arange(len(pool) + len(at)),
            np.append(np.arange(len(pool)), at - 0.5),
        )
    )
    keep = np.append(keep, np.ones(len(at), np.bool_))[rows]
    merged = {name: np.append(columns[name], own[name])[rows][keep] for name in COLUMNS}
    merged["address"] = np.full(len(merged["kind"]), -1)
    unserved = table.size[match < 0]
    metadata = {
        **seen.metadata,
        "alignment": pool.metadata["alignment"],
        "client": "torch",
        "unserved_bytes": str(int(unserved.sum())),
    }
    return Trace.of(**named_only(merged, names), metadata=metadata)


def _renamed(trace: Trace, names: list[str], number: dict[str, int]) -> Trace:
    place = np.array([*(number[name] for name in trace.names), -1], np.int64)
    columns = {name: place[getattr(trace, name)] for name in NAMED}
    return dataclasses.replace(trace, names=tuple(names), **columns)


def _ends(pool: Trace) -> Ints:
    """Return the row of the free of each event's buffer; the trace's length without a free."""
    end = np.full(int(pool.buffer.max(initial=-1)) + 2, len(pool))
    freed = np.flatnonzero(pool.kind == EventType.FREE)
    end[pool.buffer[freed]] = freed
    return end[pool.buffer]


def _matches(pool: Trace, alloc: Ints, time: Ints, until: Ints, table: Table) -> Ints:
    """Return the row of the pool's alloc of each recorded buffer, int64[m]; -1 without a match."""
    if not len(alloc) or not len(table.size):
        return np.full(len(table.size), -1)
    order = alloc[np.argsort(pool.address[alloc], kind="stable")]  # by address, then in time
    address = pool.address[order]
    key = np.append(address, table.pointer)
    when = np.append(time[order], table.seen)
    kind = np.append(np.zeros(len(order), np.int8), np.ones(len(table.pointer), np.int8))
    sorted_rows = np.lexsort((kind, when, key))
    at = np.where(sorted_rows < len(order), sorted_rows, -1)
    last = np.maximum.accumulate(at)
    found = np.full(len(key), -1)
    found[sorted_rows] = last
    found = found[len(order) :]
    row = np.where(found >= 0, order[found], -1)
    ended = np.append(time, np.iinfo(np.int64).max)[until[row]]
    fits = (found >= 0) & (pool.address[row] == table.pointer) & (table.seen <= ended) & (table.pointer > 0)
    return np.where(fits & (table.size > 0), row, -1)


def _tell(
    columns: dict[str, NDArray[np.int64]],
    alloc: Ints,
    table: Table,
    recorder: AccessRecorder,
    number: dict[str, int],
    seen: Trace,
    match: Ints,
) -> None:
    """Set operation, module and category of the pool's allocs."""
    operations, modules = ([number[name] for name in names] for names in map(_shown, recorder.names))
    spans = table.spans
    if len(spans.begin_ns):
        time, order = columns["time_ns"][alloc], np.argsort(spans.begin_ns, kind="stable")
        span = order[np.searchsorted(spans.begin_ns[order], time, side="right") - 1]
        inside = (spans.begin_ns[span] <= time) & (time <= spans.end_ns[span])
        rows, span = alloc[inside], span[inside]
        columns["operation"][rows] = np.array([*operations, -1])[spans.name[span]]
        columns["module"][rows] = np.array([*modules, -1])[spans.module[span]]
    columns["category"][alloc] = number["temporaries"]
    known = np.flatnonzero(seen.kind == EventType.ALLOC)
    known = known[match[seen.buffer[known]] >= 0]
    rows = match[seen.buffer[known]]
    for name in ("operation", "module", "category"):
        columns[name][rows] = getattr(seen, name)[known]


def _shown(names: list[str]) -> list[str]:
    return [STEP if name == FOUND_STEP else name for name in names]


def _placed(
    seen: Trace, match: Ints, time: Ints, until: Ints, pool: Trace
) -> tuple[dict[str, NDArray[np.int64]], Ints]:
    """Return the recorder's accesses and marks, and for each the pool row that follows."""
    mark = seen.kind == EventType.MARK
    row = np.where(mark, -1, match[seen.buffer] if len(match) else -1)
    keep = np.flatnonzero(mark | ((row >= 0) & ~np.isin(seen.kind, _OWN)))
    mark, row = mark[keep], row[keep]
    at = np.searchsorted(time, seen.time_ns[keep], side="right")
    end = np.append(until, len(pool))[row]
    at = np.where(mark, at, np.clip(at, row + 1, end))
    own = {name: getattr(seen, name)[keep].astype(np.int64) for name in COLUMNS}
    own["buffer"] = np.where(mark, -1, np.append(pool.buffer, -1)[row])
    own["stream"] = np.where(mark, 0, np.append(pool.stream, 0)[row])
    own["thread"] = np.where(mark, 0, np.append(pool.thread, 0)[row])
    own["device"] = np.where(mark, 0, np.append(pool.device, 0)[row])
    return own, at
