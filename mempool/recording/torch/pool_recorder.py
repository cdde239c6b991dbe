"""Recorder of PyTorch's accesses and of the pool's allocations and frees."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mempool import _core, torch
from mempool.errors import UsageError
from mempool.per_rank_files import own_file
from mempool.recording.events import RECORD, EventConverter
from mempool.recording.torch import AccessRecorder
from mempool.recording.torch.tracing import FOUND_STEP, STEP, named_only
from traces.formats.parquet import write_trace
from traces.trace import COLUMNS, NAMED, EventType, Trace

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from mempool.recording.torch.rows import Table
    from mempool.torch.pool import TensorPool

    Ints = NDArray[np.int64]


_BLOCK = np.dtype(list(_core.BLOCK_FIELDS))


class AccessRecording:
    """A recording of accesses: see `mempool.torch.record`.

    Attributes:
        trace: the recorded trace, set when the ``with`` block has ended.
    """

    trace: Trace

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        model: nn.Module | Iterable[nn.Module] | None,
        optimizer: Optimizer | Iterable[Optimizer] | None,
    ) -> None:
        self._path = None if path is None else own_file(os.fspath(path))
        self._pool = torch.installed()
        if self._pool is not None and self._pool.settings.mode == "off":
            self._pool = None
        if self._pool is not None and self._pool.settings.record is not None:
            raise UsageError("the pool writes a trace already: record accesses without record=")
        self.recorder = AccessRecorder(_several(model), _several(optimizer), places=self._pool is not None)
        self._tape: PoolTape | None = None

    def own(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Assign tensors to a category of the program, for example "inputs"."""
        self.recorder.own(category, tensors)

    def mark(self, name: str) -> None:
        """Set a mark, as `mempool.recording.torch.AccessRecorder.mark` does."""
        self.recorder.mark(name)

    def step(self) -> None:
        """Mark the end of an iteration; without such marks, the optimizer's steps end iterations."""
        self.recorder.step()

    def __enter__(self) -> Self:
        if self._pool is not None:
            folder = None if self._path is None else str(Path(self._path).absolute().parent)
            self._tape = PoolTape(self._pool, folder)
        try:
            self.recorder.__enter__()
        except BaseException:
            if self._tape is not None:
                self._tape.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.recorder.__exit__(kind, error, trace)
        with _core.Bypass():
            table = self.recorder.table()
            seen = self.recorder.trace(table)
            self.trace = (
                seen if self._tape is None else merge_traces(self._tape.stop(), seen, table, self.recorder)
            )
            if self._path is not None:
                write_trace(self.trace, self._path)


def _several(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


class PoolTape:
    """Tape of all later events of a pool, preceded by the buffers that are alive at its start."""

    def __init__(self, pool: TensorPool, folder: str | None) -> None:
        self._pool, self._began_ns = pool, time.perf_counter_ns()
        pool.client.set_tracing(True, folder=folder or tempfile.gettempdir())
        _, blocks, _ = _core.snapshot(pool.core)
        self._there = np.frombuffer(blocks, _BLOCK)

    def stop(self) -> Trace:
        """Stop the tape and return the trace, with addresses.

        Raises:
            MemoryError: not all events could be stored.
        """
        client = self._pool.client
        client.set_tracing(False)
        pieces = []
        while packed := client.take_trace():
            pieces.append(np.frombuffer(packed, RECORD))
        if lost := client.state()["trace_lost"]:
            raise MemoryError(f"no room for {lost:,} events of the pool")
        records = np.concatenate([np.empty(0, RECORD), *pieces])
        recording = EventConverter(self._pool.device.alignment, addresses=True)
        return recording.trace(np.concatenate([self._first(records), records]).view(np.uint8))

    def _first(self, records: NDArray[Any]) -> NDArray[Any]:
        """Return allocations for the initially live blocks, except blocks allocated after the tape began."""
        live = self._there[self._there["state"] == _core.BLOCK_STATES.index("live")]
        address, row = np.unique(records["address"], return_index=True)
        new = address[records["kind"][row] == 0]
        live = live[~np.isin(live["address"], new)]
        first = np.zeros(len(live), RECORD)
        first["address"], first["size"] = live["address"], live["requested"]
        first["time_ns"] = self._began_ns
        return first


_OWN = (EventType.ALLOC, EventType.FREE)


def merge_traces(pool: Trace, seen: Trace, table: Table, recorder: AccessRecorder) -> Trace:
    """Merge the pool's allocs and frees with the recorder's accesses, marks and names.

    A storage is identified with the pool's buffer that was alive at its address. An access gets the start
    time of its operation, moved into the life of the accessed buffer, since an operation's outputs are
    allocated after its start. Storages that the pool did not serve are omitted.

    Args:
        pool: the pool's trace, with addresses; its marks are dropped if the recorder's marks end iterations.
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
    match = _matches(pool, alloc, time, until, table)  # row of the alloc by buffer of the recorder
    columns = {name: getattr(pool, name).copy() for name in COLUMNS}
    _copy_attributes(columns, alloc, table, recorder, number, seen, match)
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
    order = alloc[np.argsort(pool.address[alloc], kind="stable")]  # by address, then by time
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


def _copy_attributes(
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
    """Return the recorder's accesses and marks, with the next row of the pool for each."""
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
