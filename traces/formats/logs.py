"""Conversion of log events by address to the rows of a trace, whole or in pieces, for all log readers.

A log has addresses, a trace has buffers. A freed buffer without an alloc is older than the log, and the trace
allocates it at the start. Since the reader finds such buffers up to the log's end, a log is either read once
and held whole, or read twice: first for the older buffers, then for the events.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from traces import _core
from traces.columns import LARGEST, MAX_EVENTS, MOST_THREADS, PIECE_EVENTS
from traces.completeness import known_before
from traces.errors import TraceError
from traces.trace import COLUMNS, UNKNOWN, EventType, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from _typeshed import StrPath
    from numpy.typing import NDArray

    #: Function that reads a file into a log, and yields often, so that the caller can take pieces.
    Fill = Callable[[StrPath, "Log"], Iterator[None]]

#: Columns that a log can fill, in the order of `Log.rows`.
_TOLD = (
    "kind",
    "buffer",
    "size",
    "stream",
    "device",
    "thread",
    "time_ns",
    "operation",
    "frame",
    "address",
)


@dataclass
class Log:
    """Events collected so far, and the living buffers.

    Attributes:
        skipped: receives the counts of events that contradict others, by reason; None: the first is an error.
        progress: as of `traces.read.read`; the reader of the file calls this function.
        said: numeric metadata, such as the type of the device.
        names: the strings behind the trace's columns of names.
    """

    skipped: Counter[str] | None = None
    progress: Callable[[int, int], object] | None = None
    said: Counter[str] = field(default_factory=Counter)
    names: Sequence[str] = ()
    _living: defaultdict[int, _core.Living] = field(default_factory=lambda: defaultdict(_core.Living))
    _buffers: int = 0
    _threads: dict[Hashable, int] = field(default_factory=dict)
    _rows: array[int] = field(default_factory=lambda: array("q"))
    _before: array[int] = field(default_factory=lambda: array("q"))
    _begin: int | None = None
    _reserved_before: Counter[int] = field(default_factory=Counter)

    def alloc(self, device: int, address: int, size: int, *where: int) -> None:
        """Add a new buffer; ``where`` is stream, thread, time in ns and, if known, operation and frame.

        Raises:
            TraceError: another buffer lives at the address, or overlaps the new one.
        """
        buffer = self._buffers
        try:
            self._living[device].alloc(address, size, buffer)
        except _core.Refused as error:
            raise TraceError(f"{error}: address {address:#x}") from None
        self._buffers += 1
        self._add(self._rows, EventType.ALLOC, buffer, size, device, address, *where)

    def free(self, device: int, address: int, size: int, *where: int) -> None:
        """End a buffer; arguments as of `alloc`; ``size`` counts only if the buffer is older than the log.

        Raises:
            TraceError: the buffer was freed already, or is older than the log and overlaps a living buffer.
        """
        try:
            buffer = self._living[device].free(address, size, self._buffers)
        except _core.Refused as error:
            raise TraceError(f"{error}: address {address:#x}") from None
        if buffer == self._buffers:
            self._buffers += 1
            self._add(self._before, EventType.ALLOC, buffer, size, device, address, *where[:3])
        self._add(self._rows, EventType.FREE, buffer, 0, device, -1, *where)

    def reserve(self, device: int, address: int, size: int, *where: int) -> None:
        """Add a segment that the recorded allocator took from the device; arguments as of `alloc`."""
        self._add(self._rows, EventType.RESERVE, -1, size, device, address, *where)

    def release(self, device: int, size: int, *where: int) -> None:
        """Add bytes that the recorded allocator released at an unknown address; arguments as of `alloc`."""
        self._add(self._rows, EventType.RELEASE, -1, size, device, -1, *where)

    def refused(self, device: int, size: int, *where: int) -> None:
        """Add a refused request; arguments as of `alloc`."""
        self._add(self._rows, EventType.REFUSED, -1, size, device, -1, *where)

    def base(self, device: int, live: int, reserved: int, name: int) -> None:
        """Add memory from before the log, given only its totals in bytes.

        The totals become one buffer and one segment, both never freed; ``name`` is the operation of both.
        """
        where = (0, 0, self._begin or 0, name)
        if reserved > 0:
            self._reserved_before[device] += reserved
            self._add(self._before, EventType.RESERVE, -1, reserved, device, -1, *where)
        if live > 0:
            self._add(self._before, EventType.ALLOC, self._buffers, live, device, -1, *where)
            self._buffers += 1

    def live_before(self) -> Counter[int]:
        """Return by device the bytes of all buffers that are older than the log."""
        live = Counter[int]()
        table = np.asarray(self._before, np.int64).reshape(-1, len(_TOLD))
        for kind, _, size, _, device, *_ in table.tolist():
            live[device] += size if kind == EventType.ALLOC else 0
        return live

    def mark(self, thread: int, time: int) -> None:
        """Add a mark for the beginning of an iteration."""
        self._add(self._rows, EventType.MARK, -1, 0, 0, -1, 0, thread, time)

    def thread(self, name: Hashable) -> int:
        """Return the dense index of a thread.

        Raises:
            TraceError: there are more threads than a trace can have.
        """
        if len(self._threads) >= MOST_THREADS and name not in self._threads:
            raise TraceError(f"more than {MOST_THREADS} threads")
        return self._threads.setdefault(name, len(self._threads))

    def reject(self, error: TraceError, row: int | None) -> None:
        """Count an invalid event by the error's reason up to the first colon, if the log skips such events.

        Raises:
            TraceError: the log does not skip events; the error with the row.
        """
        if self.skipped is None:
            raise TraceError(error.reason, row=row) from None
        self.skipped[error.reason.partition(":")[0]] += 1

    def _add(
        self,
        rows: array[int],
        kind: int,
        buffer: int,
        size: int,
        device: int,
        address: int,
        stream: int,
        thread: int,
        time: int,
        operation: int = -1,
        frame: int = -1,
    ) -> None:
        if self._begin is None:
            self._begin = time
        rows.extend((kind, buffer, size, stream, device, thread, time, operation, frame, address))

    @property
    def full(self) -> bool:
        """True if there are enough events for a piece."""
        return len(self._rows) >= PIECE_EVENTS * len(_TOLD)

    def take(self) -> dict[str, NDArray[Any]]:
        """Return the columns of the events since the last `take`."""
        taken, self._rows = self._rows, array("q")
        return _columns(taken)

    def before(self) -> dict[str, NDArray[Any]]:
        """Return the columns of the allocs of older buffers, at the time of the log's first event."""
        found = _columns(self._before)
        found["time_ns"] = np.full(len(found["time_ns"]), self._begin or 0)
        return found

    def metadata(self, known: Mapping[str, str]) -> dict[str, str]:
        """Return ``known`` with the numbers of `said` and the memory from before the log."""
        counted = {name: str(count) for name, count in sorted(self.said.items())}
        kinds = self._before[:: len(_TOLD)]
        return {
            **known,
            "alive_before": str(sum(kind == EventType.ALLOC for kind in kinds)),
            **known_before(
                {
                    device: (True, live, self._reserved_before[device])
                    for device, live in self.live_before().items()
                }
            ),
            **counted,
        }


def read_log(
    path: StrPath,
    fill: Fill,
    known: Mapping[str, str],
    skipped: Counter[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Trace:
    """Read a log as one trace.

    Raises:
        TraceError: naming the file, as ``fill`` and `Log` do, or more than `MAX_EVENTS` events.
        OSError: the file cannot be read.
    """
    log = Log(skipped, progress)
    pieces: list[dict[str, NDArray[Any]]] = []
    try:
        for _ in fill(path, log):
            if log.full:
                pieces.append(log.take())
                if len(pieces) * PIECE_EVENTS > MAX_EVENTS:
                    raise TraceError(f"more than {MAX_EVENTS} events, the most read at once")
        pieces = [log.before(), *pieces, log.take()]
        table = {name: np.concatenate([piece.pop(name) for piece in pieces]) for name in COLUMNS}
        trace = Trace.of(**table, names=tuple(log.names), metadata=log.metadata(known))
        _validate(trace)
    except TraceError as error:
        raise error.within(path) from None
    return trace


def iter_log(
    path: StrPath, fill: Fill, known: Mapping[str, str], skipped: Counter[str] | None = None
) -> Iterator[Trace]:
    """Yield a log as pieces of a trace; read twice, in bounded memory except for the addresses.

    The first piece, which may be empty, holds the buffers older than the log.

    Raises:
        TraceError: naming the file, as ``fill`` and `Log` do.
        OSError: the file cannot be read.
    """
    first = Log(skipped)
    try:
        for _ in fill(path, first):
            if first.full:
                first.take()
        metadata = first.metadata(known)
        yield Trace(**first.before(), names=(), metadata=metadata)
        log = Log(None if skipped is None else Counter())
        for _ in fill(path, log):
            if log.full:
                yield Trace(**log.take(), names=tuple(log.names), metadata=metadata)
        yield Trace(**log.take(), names=tuple(log.names), metadata=metadata)
    except TraceError as error:
        raise error.within(path) from None


def refused_size(value: object) -> int:
    """Return the bytes of a request that failed, from a number or its text; 0 if unknown.

    Larger sizes count as 2**52, so that the failure is recorded with any size.
    """
    text = str(value).strip()[:40]
    return min(int(text), LARGEST // 1024) if text.isascii() and text.isdigit() else 0


def number(value: int, name: str) -> int:
    """Return ``value`` if a trace can hold this number.

    Raises:
        TraceError: a trace cannot.
    """
    if not 0 <= value <= LARGEST:
        raise TraceError(f"not a number from 0 to 2**62: {name} {str(value)[:40]}")
    return value


def _columns(rows: array[int]) -> dict[str, NDArray[Any]]:
    table = np.asarray(rows, np.int64).reshape(-1, len(_TOLD))
    told = {name: table[:, at].astype(COLUMNS[name]) for at, name in enumerate(_TOLD)}
    return told | {
        name: np.full(len(table), UNKNOWN[name], dtype) for name, dtype in COLUMNS.items() if name not in told
    }


def _validate(trace: Trace) -> None:
    """Validate a trace; errors do not name rows, which would be events, not lines of the file."""
    try:
        trace.validate()
    except TraceError as error:
        raise TraceError(
            f"event {error.row}: {error.reason}" if error.row is not None else error.reason
        ) from None
